"""Signals that wait: between Slurm's acceptance of a job and the record of its number, nothing may end the launcher.

A job of which nobody has written the number down is found only by asking Slurm (`launch.unrecorded`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_signals() -> Iterator[None]:
    """What would end the process counts at the end of the block; a second Ctrl-C is obeyed at once (KeyboardInterrupt).

    Signals that the process ignores (nohup) stay ignored. Outside the main thread nothing can be held, and nothing is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGINT and signal.SIGINT in came:
            raise KeyboardInterrupt
        came.append(signum)

    before = {signum: signal.getsignal(signum) for signum in HELD}
    before = {signum: handler for signum, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for signum in before:
        signal.signal(signum, note)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if came:
            os.kill(os.getpid(), came[0])
