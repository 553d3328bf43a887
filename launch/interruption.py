"""Signals that end the supervisor, as a cause that its loop can look at."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from launch.verdict import Cause

HARD_STOP_S = 90
"""After the first signal the supervisor has this long; then SIGALRM ends it, and with it every step (PDEATHSIG)."""

PARENT_GONE = "the launcher, or submitit's controller that it started, ended, and the run with it"
"""The kernel says only that the parent is gone. Of a local run that is submitit's controller, which dies with the launcher."""

CANCELLED = {signal.SIGTERM: 143, signal.SIGINT: 130}


class Interruption:
    """TERM and INT cancel the run; USR1 (`--signal=B:USR1@...`) and USR2 (submitit's local time limit) announce the limit."""

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self._event = threading.Event()
        self._parent = os.getppid()

    def install(self) -> None:
        """In place of submitit's handlers, which swallow TERM. Main thread only."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGCONT, signal.SIG_IGN)  # Slurm sends CONT with every TERM
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes, at most `seconds`."""
        self._event.wait(seconds)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self.cause is None:
            self.cause = self._cause(signum)
            signal.alarm(HARD_STOP_S)
        self._event.set()

    def _cause(self, signum: int) -> Cause:
        name = signal.Signals(signum).name
        if signum not in CANCELLED:
            return Cause("supervisor", "time_limit", f"the time limit is near ({name}); raise slurm.time_min", 124)
        code = CANCELLED[signal.Signals(signum)]
        if os.getppid() != self._parent:
            return Cause("supervisor", "cancelled", PARENT_GONE, code)
        return Cause("supervisor", "cancelled", f"the run was cancelled ({name})", code)
