"""Several threads for copying, hashing and file operations, which all release the GIL."""

from __future__ import annotations

import heapq
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_THREADS = 16
_BYTES_WORTH_A_THREAD = 4_000_000
_QUICK_S = 0.0005


def thread_count(wanted: int, num_bytes: int | None = None) -> int:
    """`wanted` threads (0: one per usable processor, at most 16), but none that would have nothing to do."""
    most = wanted or min(MOST_THREADS, len(os.sched_getaffinity(0)))
    return most if num_bytes is None else max(1, min(most, -(-num_bytes // _BYTES_WORTH_A_THREAD)))


def map_threads(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """`function` of every item, in order; an error is raised after the running calls have ended, and no further call is made.

    The caller's own thread is one of `threads`, and each takes the next item when it has done one: where something else keeps the
    interpreter busy (an engine that generates), every handover between threads may take milliseconds, so there is none for an item.
    """
    if threads <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    waiting, done = deque(range(len(items))), dict[int, Result]()

    def work() -> None:
        while waiting:
            try:
                index = waiting.popleft()
            except IndexError:  # another thread took the last
                return
            try:
                done[index] = function(items[index])
            except BaseException:
                waiting.clear()
                raise

    others = min(threads, len(items)) - 1
    with ThreadPoolExecutor(others, thread_name_prefix="weights") as pool:
        workers = [pool.submit(work) for _ in range(others)]
        try:
            work()
        finally:
            waiting.clear()
        for worker in workers:
            worker.result()
    return [done[index] for index in range(len(items))]


class _Handover:
    """Of the interpreter's lock. `usual_s` is what was set before the first that wants it quick."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._usual_s = 0.0

    @contextmanager
    def quick(self) -> Iterator[None]:
        """A thread that waits for the interpreter's lock asks for it after half a millisecond instead of five, in all the process.

        For some threads that mostly copy and hash, beside one that computes: every return from a system call is such a wait.
        """
        with self._lock:
            if not self._wanted:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(_QUICK_S, self._usual_s))
            self._wanted += 1
        try:
            yield
        finally:
            with self._lock:
                self._wanted -= 1
                if not self._wanted:
                    sys.setswitchinterval(self._usual_s)


quick_handover = _Handover().quick


Job = tuple[int, int, Callable[[], Result]]
"""Number, size, what to do."""


class Lanes(Generic[Result]):
    """Jobs in lanes: a few threads do those of a lane in the given order, but never two of one lane at the same time.

    A file is a lane: Linux lets one thread at a time write to a file (it holds the inode's lock), so others would wait. The lane
    with most left to do comes first, so that none is left to one thread at the end while the others have nothing to do; of equal
    ones that with the oldest job.
    """

    def __init__(self, jobs: Iterable[tuple[Hashable, int, Callable[[], Result]]]) -> None:
        """Lane, size in any unit, and what to do, for each."""
        lanes: dict[Hashable, deque[Job[Result]]] = {}
        for number, (lane, size, job) in enumerate(jobs):
            lanes.setdefault(lane, deque()).append((number, size, job))
        self._idle = [_entry(sum(size for _, size, _ in lane), lane) for lane in lanes.values()]
        heapq.heapify(self._idle)
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
        while (taken := self._take()) is not None:
            left, lane = taken
            _, size, job = lane.popleft()
            try:
                results.append(job())
            except BaseException:
                self.stop()
                raise
            self._give_back(left - size, lane)
        return results

    def _take(self) -> tuple[int, deque[Job[Result]]] | None:
        with self._lock:
            if self._stopped or not self._idle:
                return None
            left, _, lane = heapq.heappop(self._idle)
            return -left, lane

    def _give_back(self, left: int, lane: deque[Job[Result]]) -> None:
        if lane:
            with self._lock:
                heapq.heappush(self._idle, _entry(left, lane))


def _entry(left: int, lane: deque[Job[Result]]) -> tuple[int, int, deque[Job[Result]]]:
    """In a heap, on top the lane with most left, then the one with the oldest job."""
    return -left, lane[0][0], lane
