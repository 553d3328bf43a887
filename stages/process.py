"""Processes that die with their parent, and stages that stop when asked."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1


INCARNATION_VARIABLE = "LIBRA_INCARNATION"


class ParentGoneError(RuntimeError):
    """The parent had already died when the death signal was set."""


def die_with_parent(expected_parent: int | None = None, signum: int = signal.SIGKILL) -> None:
    """Ask Linux to send `signum` to this process when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG).

    The signal follows the *thread* that forked, so children must be started from the main thread. The setting survives
    exec but not fork. Raises ParentGoneError when `expected_parent` is given and is no longer the parent: it died
    before the call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if expected_parent is not None and os.getppid() != expected_parent:
        raise ParentGoneError(f"parent {expected_parent} is gone")


def incarnation() -> int:
    """Which start of its step within the attempt this process belongs to: 0 for the first, or when started by hand."""
    return int(os.environ.get(INCARNATION_VARIABLE, "0"))


def environments() -> Iterator[bytes]:
    """Of all processes that we may look at."""
    for process in Path("/proc").glob("[0-9]*/environ"):
        try:
            yield process.read_bytes()
        except OSError:
            pass  # somebody else's, or it has just ended


PRIVATE_UMASK = 0o077
"""Logs, result pickles and span files are made by others (srun, submitit, libraries), with whatever the umask leaves."""


@contextmanager
def private_files() -> Iterator[None]:
    """What is made meanwhile, also by processes that are started, belongs to its owner alone."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def install_stop_handlers(stop: threading.Event) -> None:
    """TERM, INT and USR2 set `stop`; CONT is ignored. Main thread only.

    submitit's own handlers swallow TERM, and on USR2 every step's rank 0 would requeue the whole job, so stages replace
    them inside the callable (facts: submitit.core.job_environment.SignalHandler).
    """

    def on_stop(_signum: int, _frame: FrameType | None) -> None:
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(signum, on_stop)
    signal.signal(signal.SIGCONT, signal.SIG_IGN)
