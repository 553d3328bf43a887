"""Jobs in lanes, the memory of snapshots, and which filesystems are a host's own."""

from __future__ import annotations

import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.weights import parallel
from stages.weights.filesystems import LOCAL, filesystem_magic
from stages.weights.parallel import Lanes, map_threads, quick_handover
from stages.weights.snapshot import HostBuffers


class Busy:
    """Notices when two jobs of one lane run at the same time."""

    def __init__(self) -> None:
        self.now: set[int] = set()
        self.lock = threading.Lock()
        self.order: list[int] = []

    def job(self, lane: int, number: int) -> int:
        with self.lock:
            assert lane not in self.now
            self.now.add(lane)
            self.order.append(number)
        with self.lock:
            self.now.remove(lane)
        return number


@settings(max_examples=30, deadline=None)
@given(lanes=st.lists(st.integers(0, 4), max_size=40), threads=st.integers(1, 6))
def test_every_job_is_done_once_and_lanes_never_overlap(lanes: list[int], threads: int) -> None:
    busy = Busy()
    with ThreadPoolExecutor(threads) as pool:
        jobs = [(lane, 1, partial(busy.job, lane, number)) for number, lane in enumerate(lanes)]
        done = [number for worker in Lanes(jobs).start(pool, threads) for number in worker.result()]

    assert sorted(done) == list(range(len(lanes)))


def test_one_thread_does_the_jobs_in_order() -> None:
    busy = Busy()
    with ThreadPoolExecutor(1) as pool:
        jobs = [(lane, 1, partial(busy.job, lane, number)) for number, lane in enumerate([0, 1, 0, 2, 1])]
        Lanes(jobs).start(pool, 1)

    assert busy.order == [0, 1, 2, 3, 4]


def test_the_lane_with_most_left_comes_first_though_its_jobs_were_given_last() -> None:
    """A head matrix is the last tensor and has a file of its own: begun last, it would keep one thread busy and all others waiting."""
    busy = Busy()
    sizes = [(0, 3), (1, 2), (0, 3), (2, 4), (2, 4), (2, 4)]
    with ThreadPoolExecutor(1) as pool:
        Lanes([(lane, size, partial(busy.job, lane, number)) for number, (lane, size) in enumerate(sizes)]).start(
            pool, 1
        )

    assert busy.order == [3, 4, 0, 5, 2, 1]


def test_lanes_that_weigh_nothing_follow_each_other_behind_the_others() -> None:
    busy = Busy()
    sizes = [0, 0, 5, 0, 0]
    with ThreadPoolExecutor(1) as pool:
        Lanes([(lane, size, partial(busy.job, lane, lane)) for lane, size in enumerate(sizes)]).start(pool, 1)

    assert busy.order == [2, 0, 1, 3, 4]


def test_two_lanes_are_worked_on_at_the_same_time() -> None:
    together = threading.Barrier(2, timeout=20)
    with ThreadPoolExecutor(2) as pool:
        workers = Lanes([("a", 1, together.wait), ("b", 1, together.wait)]).start(pool, 2)

    assert sorted(number for worker in workers for number in worker.result()) == [0, 1]


def test_after_a_failure_no_job_is_begun() -> None:
    busy = Busy()

    def failing() -> int:
        raise OSError("disk broke")

    jobs = [("a", 1, partial(busy.job, 0, 0)), ("b", 1, partial(failing)), ("c", 1, partial(busy.job, 2, 2))]
    with ThreadPoolExecutor(1) as pool:
        (worker,) = Lanes(jobs).start(pool, 1)

        with pytest.raises(OSError, match="disk broke"):
            worker.result()
    assert busy.order == [0]


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 3000), max_size=20))
def test_host_buffers_never_give_the_same_byte_twice(sizes: list[int]) -> None:
    buffers = HostBuffers(pinned=False)

    for _ in range(2):
        buffers.clear()
        taken = [buffers.take(size) for size in sizes]
        for number, tensor in enumerate(taken):
            tensor.fill_(number)
        assert all(bool((tensor == number).all()) for number, tensor in enumerate(taken))


def test_host_memory_that_two_versions_did_not_need_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.weights.snapshot._FIRST_SEGMENT_BYTES", 1024)
    buffers, allocated = HostBuffers(pinned=False), []

    for versions_bytes in (4000, 0, 4000, 0, 0, 0):
        buffers.clear()
        if versions_bytes:
            buffers.take(versions_bytes)
        allocated.append(buffers.allocated_bytes)

    assert allocated == [4000, 4000, 4000, 4000, 4000, 0]


def test_host_buffers_grow_by_powers_of_two_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.weights.snapshot._FIRST_SEGMENT_BYTES", 1024)
    monkeypatch.setattr("stages.weights.snapshot._LAST_SEGMENT_BYTES", 4096)
    buffers = HostBuffers(pinned=False)

    for _ in range(2):
        buffers.clear()
        for _ in range(9):
            buffers.take(1000)
        assert buffers.allocated_bytes == 1024 + 2048 + 4096 + 4096


def test_small_pieces_take_the_room_that_large_ones_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.weights.snapshot._FIRST_SEGMENT_BYTES", 4096)
    monkeypatch.setattr("stages.weights.snapshot._LAST_SEGMENT_BYTES", 4096)
    buffers = HostBuffers(pinned=False)

    for size in (3072, 3072, 1024, 1024):
        buffers.take(size)

    assert buffers.allocated_bytes == 2 * 4096


def test_the_kind_of_a_filesystem_is_found(tmp_path: Path) -> None:
    assert LOCAL[filesystem_magic(Path("/dev/shm"))] == "tmpfs"
    assert filesystem_magic(Path("/proc")) not in LOCAL
    with pytest.raises(FileNotFoundError):
        filesystem_magic(tmp_path / "missing")


# ---- items for some threads --------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(items=st.lists(st.integers(), max_size=30), threads=st.integers(1, 5))
def test_results_come_in_the_order_of_their_items(items: list[int], threads: int) -> None:
    assert map_threads(lambda item: item + 1, items, threads) == [item + 1 for item in items]


def test_the_callers_thread_is_one_of_those_that_work() -> None:
    together = threading.Barrier(3, timeout=20)

    def work(_item: int) -> int:
        together.wait()
        return threading.get_ident()

    found = map_threads(work, [0, 1, 2], 3)

    assert len(set(found)) == 3
    assert threading.get_ident() in found


@pytest.mark.parametrize("threads", [1, 2])
def test_after_an_error_no_further_item_is_begun_and_the_running_ones_end(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    ended: list[int] = []
    together, no_more = threading.Barrier(threads, timeout=20), threading.Event()

    class Waiting(deque[int]):
        def clear(self) -> None:
            super().clear()
            no_more.set()

    def work(item: int) -> None:
        begun.append(item)
        together.wait()
        if item == 0:
            raise ValueError("item 0")
        assert no_more.wait(20)
        ended.append(item)

    monkeypatch.setattr(parallel, "deque", Waiting)
    with pytest.raises(ValueError, match="item 0"):
        map_threads(work, list(range(9)), threads)

    assert sorted(begun) == list(range(threads))
    assert ended == list(range(1, threads))


def test_the_interpreter_s_lock_is_handed_over_quickly_until_nobody_wants_that_any_more() -> None:
    usual_s = sys.getswitchinterval()
    with quick_handover():
        with quick_handover():
            assert sys.getswitchinterval() < usual_s
        assert sys.getswitchinterval() < usual_s

    assert sys.getswitchinterval() == usual_s


def test_a_quicker_handover_than_ours_is_left_alone() -> None:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with quick_handover():
            assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(usual_s)
