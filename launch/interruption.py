"""Signals to the supervisor, as facts that its loop can look at."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from launch.verdict import Cause

HARD_STOP_S = 90
"""After TERM or INT the supervisor has this long; then SIGALRM ends it, and with it every step (PDEATHSIG)."""

PARENT_GONE = "the launcher, or submitit's controller that it started, ended, and the run with it"
"""The kernel says only that the parent is gone. Of a local run that is submitit's controller, which dies with the launcher."""

CANCELLED = {signal.SIGTERM: 143, signal.SIGINT: 130}
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class Interruption:
    """TERM and INT are orders to end (`cause`); USR1 (`--signal=B:USR1@...`) and USR2 (submitit's local time limit) announce the
    limit (`warning`, the signal's name)."""

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.warning = ""
        self._event = threading.Event()
        self._parent = os.getppid()
        self._is_installed = False

    def install(self) -> None:
        """In place of submitit's handlers, which swallow TERM. Main thread only."""
        for signum in (*CANCELLED, *WARNINGS):
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGCONT, signal.SIG_IGN)  # Slurm sends CONT with every TERM
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._is_installed = True

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes, at most `seconds`; once one has come, just sleep."""
        if self._event.wait(seconds):
            self._event.clear()

    def allow(self, seconds: float) -> None:
        """Whatever happens, be ended by SIGALRM after so long, and HARD_STOP_S more."""
        if self._is_installed:
            signal.alarm(int(seconds) + HARD_STOP_S)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if signum in WARNINGS:
            self.warning = self.warning or signal.Signals(signum).name
        elif self.cause is None:
            self.cause = self._cause(signal.Signals(signum))
            self.allow(0)
        self._event.set()

    def _cause(self, signum: signal.Signals) -> Cause:
        code = CANCELLED[signum]
        if os.getppid() != self._parent:
            return Cause("supervisor", "cancelled", PARENT_GONE, code)
        return Cause("supervisor", "cancelled", f"the run was cancelled ({signum.name})", code)
