"""Several threads for copying, hashing and file operations, which all release the GIL."""

from __future__ import annotations

import heapq
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_THREADS = 16
_BYTES_WORTH_A_THREAD = 4_000_000


def thread_count(wanted: int, num_bytes: int | None = None) -> int:
    """`wanted` threads (0: one per usable processor, at most 16), but none that would have nothing to do."""
    most = wanted or min(MOST_THREADS, len(os.sched_getaffinity(0)))
    return most if num_bytes is None else max(1, min(most, -(-num_bytes // _BYTES_WORTH_A_THREAD)))


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


Job = tuple[int, Callable[[], Result]]


class Lanes(Generic[Result]):
    """Jobs in lanes: a few threads do them in the given order, but never two of one lane at the same time.

    A file is a lane: Linux lets one thread at a time write to a file (it holds the inode's lock), so others would wait.
    """

    def __init__(self, jobs: Iterable[tuple[Hashable, Callable[[], Result]]]) -> None:
        lanes: dict[Hashable, deque[Job[Result]]] = {}
        for number, (lane, job) in enumerate(jobs):
            lanes.setdefault(lane, deque()).append((number, job))
        self._idle = [(lane[0][0], lane) for lane in lanes.values()]  # a heap: on top the lane with the oldest job
        self._lock = threading.Lock()
        self._stopped = False

    def start(self, pool: ThreadPoolExecutor, threads: int) -> list[Future[list[Result]]]:
        """Futures of `threads` workers (or one for each lane), whose results together are those of all jobs.

        The future of a worker whose job failed has the error, and no worker begins another job.
        """
        return [pool.submit(self._work) for _ in range(min(threads, len(self._idle)))]

    def stop(self) -> None:
        """Begin no further job."""
        self._stopped = True

    def _work(self) -> list[Result]:
        """A worker that finds no idle lane leaves: whoever is busy goes on with his lane himself."""
        results: list[Result] = []
        while (lane := self._take()) is not None:
            try:
                results.append(lane.popleft()[1]())
            except BaseException:
                self.stop()
                raise
            self._give_back(lane)
        return results

    def _take(self) -> deque[Job[Result]] | None:
        with self._lock:
            return heapq.heappop(self._idle)[1] if self._idle and not self._stopped else None

    def _give_back(self, lane: deque[Job[Result]]) -> None:
        if lane:
            with self._lock:
                heapq.heappush(self._idle, (lane[0][0], lane))
