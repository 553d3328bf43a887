"""Ctrl-C while a run is followed: leave it alone, or on a second one end it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from launch.cancel import ask_to_end, cancel
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
        deaf()
    except KeyboardInterrupt:
        _end(run)
    raise InterruptedRunError(
        f"to see it again: python -m launch.follow {shown}\nto end it:       python -m launch.cancel {shown}"
    )


def _end(run: RunDir) -> NoReturn:
    """In two phases; one more Ctrl-C leaves the checkpoint out, and another one does not wait for the end.

    The request is written first: whoever presses Ctrl-C once too often has asked for the end all the same.
    """
    try:
        _say("ending the run, with a checkpoint first; Ctrl-C again ends it without")
        ask_to_end(run, checkpoint=True)
        words = cancel(run.root, checkpoint=True, say=_say)
    except KeyboardInterrupt:
        words = _end_now(run)
    raise InterruptedRunError(words)


def _end_now(run: RunDir) -> str:
    shown = from_here(run.root)
    try:
        _say("ending the run without a checkpoint")
        ask_to_end(run, checkpoint=False)
        return cancel(run.root, checkpoint=False, say=_say)
    except KeyboardInterrupt:
        deaf()
        return (
            f"the end of the run was asked for and is not awaited; to see it: python -m launch.status {shown}"
            f"\nto ask again:  python -m launch.cancel {shown}"
        )


def deaf() -> None:
    """This process is about to end by itself: a Ctrl-C that comes now is too late to mean anything, and must not cut off its
    last words."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
