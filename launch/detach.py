"""Ctrl-C while a run is followed: leave it alone, or on a second one end it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NoReturn

from launch.cancel import cancel
from launch.errors import InterruptedRunError
from launch.metrics import from_here
from stages.rundir import RunDir

SECOND_S = 2.0


def interrupted(run: RunDir, mode: str, sleep: Callable[[float], None] = time.sleep) -> NoReturn:
    """After the first Ctrl-C in a terminal that follows a run which lives without it. Raises InterruptedRunError."""
    shown = from_here(run.root)
    goes_on = "the job goes on" if mode == "slurm" else "the run goes on in the terminal that started it"
    _say(f"detached; {goes_on}. Ctrl-C again within {SECOND_S:g} s ends the run, with a checkpoint first")
    try:
        sleep(SECOND_S)
    except KeyboardInterrupt:
        _end(run)
    raise InterruptedRunError(
        f"to see it again: python -m launch.follow {shown}\nto end it:       python -m launch.cancel {shown}"
    )


def _end(run: RunDir) -> NoReturn:
    """In two phases; one more Ctrl-C leaves the checkpoint out, and another one leaves the run to itself."""
    try:
        _say("ending the run, with a checkpoint first; Ctrl-C again ends it without")
        words = cancel(run.root, checkpoint=True, say=_say)
    except KeyboardInterrupt:
        _say("ending the run without a checkpoint")
        words = cancel(run.root, checkpoint=False, say=_say)
    raise InterruptedRunError(words)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
