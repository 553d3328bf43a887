"""All ranks of the trainer stage, forked after the imports: `python trainer_ranks.py RUN RANKS`.

TERM is passed on to every rank. Prints the exit codes as the last line; a rank that stopped when asked ends with STOPPED.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
from pathlib import Path
from types import FrameType

from stages.context import StoppedError, open_context
from stages.process import die_with_parent, install_stop_handlers
from stages.trainer import stage

STOPPED = 3


def main(run_dir: Path, ranks: int) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(run_dir, rank, ranks)) for rank in range(ranks)]
    for process in processes:
        process.start()

    def pass_on(_signum: int, _frame: FrameType | None) -> None:
        for process in processes:
            process.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    for process in processes:
        process.join()
    print(json.dumps([process.exitcode for process in processes]))


def run_rank(run_dir: Path, rank: int, ranks: int) -> None:
    die_with_parent()
    with open_context(
        "trainer", run_dir, name="trainer", attempt=0, rank=rank, world_size=ranks, local_rank=rank
    ) as context:
        install_stop_handlers(context.stop)
        try:
            stage.run(context)
        except StoppedError as stopped:
            print(stopped, flush=True)
            sys.exit(STOPPED)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
