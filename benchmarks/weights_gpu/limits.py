"""Time limits of parts of a measurement, so that one that hangs does not take the time of the others."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LEAST_S = 1e-3  # 0 would mean no limit


class TooSlowError(TimeoutError):
    """A part of the measurement exceeded its time."""


@contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """Main thread only; may be nested, and the tightest limit holds.

    Raises TooSlowError out of whatever the block is waiting in, unless that is a single call into C.
    """

    def on_alarm(_signum: int, _frame: FrameType | None) -> None:
        raise TooSlowError(f"{what} took longer than {seconds:.0f} s")

    began_s = time.monotonic()
    outer_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if outer_s and outer_s < seconds:
        yield
        return
    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, _LEAST_S))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if outer_s:
            signal.setitimer(signal.ITIMER_REAL, max(outer_s - (time.monotonic() - began_s), _LEAST_S))


class Budget:
    """Seconds left of those that the whole measurement may take."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()
