"""Time for a disk to take what was written, as training leaves it between two refreshes.

The kernel lets a small share of memory be dirty pages (vm.dirty_ratio); beyond that whoever writes is slowed to the disk's speed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from stages.weights.filesystems import lies_in_memory

_MEMINFO = Path("/proc/meminfo")
_WAITING = re.compile(r"^(?:Dirty|Writeback):\s+(\d+) kB$", re.MULTILINE)


def dirty_bytes(meminfo: Path = _MEMINFO) -> int:
    """What this host has written and its disks have not: pages that are dirty, or on their way."""
    return 1024 * sum(int(number) for number in _WAITING.findall(meminfo.read_text(encoding="ascii")))


class Interval:
    """At least `interval_s` from the end of one refresh to the begin of the next one, in a folder that does not lie in memory."""

    def __init__(
        self,
        folder: Path,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._on_disk = not lies_in_memory(folder)
        self.interval_s = interval_s if self._on_disk else 0.0
        self._clock = clock
        self._sleep = sleep
        self._next_s = float("-inf")

    def begin(self) -> dict[str, int]:
        """Wait until the next refresh may begin; what is dirty then, where that matters."""
        self._sleep(max(0.0, self._next_s - self._clock()))
        return {"dirty_bytes": dirty_bytes()} if self._on_disk else {}

    def end(self) -> None:
        self._next_s = self._clock() + self.interval_s
