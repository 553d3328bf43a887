"""Checkpoints of a run, newest first: step, size, seconds to save, attempt, and whether every byte is as it was saved.

    python -m stages.checkpoint RUN            read all bytes of all checkpoints
    python -m stages.checkpoint RUN --quick    look at manifests and sizes only

Exit code 0: all are sound (or there is none); 1: one is damaged; 2: RUN is no run directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.checkpoint.errors import DamagedCheckpointError
from stages.checkpoint.find import Checkpoint, available, verify
from stages.files import DamagedRecordError
from stages.rundir import RunDir, RunDirectoryError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--quick", action="store_true", help="do not read the files")
    options = parser.parse_args(arguments)
    try:
        run = RunDir.open(options.run, writer="stages.checkpoint")
    except (RunDirectoryError, DamagedRecordError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    found = available(run)
    if not found:
        print(f"{run.root} has no checkpoint")
    states = [_show(checkpoint, read_all=not options.quick) for checkpoint in found]
    return 0 if all(states) else 1


def _show(checkpoint: Checkpoint | DamagedCheckpointError, *, read_all: bool) -> bool:
    """Print one line; False for a damaged one."""
    if isinstance(checkpoint, DamagedCheckpointError):
        print(checkpoint, flush=True)
        return False
    state = "sizes are right"
    if read_all:
        try:
            verify(checkpoint)
            state = "verified"
        except DamagedCheckpointError as damage:
            state = str(damage)
    manifest, layout = checkpoint.manifest, checkpoint.manifest.layout
    print(
        f"step {checkpoint.step}: {manifest.total_bytes:,} bytes, saved in {manifest.save_s:.2f} s by attempt"
        f" {checkpoint.attempt}, tp {layout.tp} dp {layout.dp} {layout.dtype} {manifest.model.architecture}: {state}",
        flush=True,
    )
    return state in ("verified", "sizes are right")


if __name__ == "__main__":
    sys.exit(main())
