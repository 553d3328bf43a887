"""Several threads for copying, hashing and file operations, which all release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_THREADS = 16
_BYTES_WORTH_A_THREAD = 4_000_000


def thread_count(wanted: int, num_bytes: int) -> int:
    """`wanted` threads (0: one per usable processor, at most 16), but none that would have nothing to do."""
    most = wanted or min(MOST_THREADS, len(os.sched_getaffinity(0)))
    return max(1, min(most, -(-num_bytes // _BYTES_WORTH_A_THREAD)))


def map_threads(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """`function` of every item, in order; the first error is raised after the running calls have ended.

    Calls not yet started are cancelled then. One thread means the caller's own.
    """
    if threads <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="weights") as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
