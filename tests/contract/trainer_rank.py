"""One rank of the trainer stage, as the launcher would start it: `python trainer_rank.py RUN RANK WORLD_SIZE`."""

from __future__ import annotations

import sys
from pathlib import Path

from stages.context import StoppedError, open_context
from stages.process import install_stop_handlers
from stages.trainer import stage

STOPPED = 3

if __name__ == "__main__":
    rank, world_size = int(sys.argv[2]), int(sys.argv[3])
    with open_context(
        "trainer", Path(sys.argv[1]), name="trainer", attempt=0, rank=rank, world_size=world_size, local_rank=rank
    ) as context:
        install_stop_handlers(context.stop)
        try:
            stage.run(context)
        except StoppedError as stopped:
            print(stopped)
            sys.exit(STOPPED)
