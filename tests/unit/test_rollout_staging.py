"""Bytes of a version that the workers of a node share: who reads, who waits, and what a killed reader leaves."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from stages.files import WaitTimeoutError, wait_for
from stages.rollout import memory_folder
from stages.rollout.memory_folder import MemoryFolder, joined_memory_folder, leave_memory_folder, sweep_memory_folders
from stages.rollout.node_folder import remove_node_folder
from stages.rollout.staging import SegmentLayout, Staging

LAYOUT = SegmentLayout.of({"a": ("F32", (3, 5)), "b": ("BF16", (7,)), "scalar": ("F32", ())})


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm."""
    monkeypatch.setattr(memory_folder, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def opened() -> Staging:
    """As another process of the node would open it: with descriptors of its own."""
    return Staging("run", LAYOUT, for_cuda=False)


def filling(one: Staging, value: float) -> Callable[[], None]:
    def fill() -> None:
        for tensor in one.tensors.values():
            tensor.fill_(value)

    return fill


def hold(one: Staging, content: str, value: float, deadline_s: float = 10.0) -> bool:
    return one.hold(content, filling(one, value), deadline_s=deadline_s, check=lambda: None)


def test_tensors_lie_apart_and_have_their_shapes_and_formats(shm: Path) -> None:
    tensors = opened().tensors

    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "a": (torch.float32, (3, 5)),
        "b": (torch.bfloat16, (7,)),
        "scalar": (torch.float32, ()),
    }
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())


def test_the_second_worker_finds_what_the_first_one_read(shm: Path) -> None:
    first, second = opened(), opened()

    assert hold(first, "version 1", 1.0)
    assert not hold(second, "version 1", 9.0)
    assert all((tensor == 1.0).all() for tensor in second.tensors.values())


def test_one_of_many_that_ask_at_the_same_time_reads(shm: Path) -> None:
    workers = [opened() for _ in range(6)]

    with ThreadPoolExecutor(len(workers)) as pool:
        read = list(pool.map(lambda one: hold(one, "version 1", 1.0), workers))

    assert sum(read) == 1


def test_bytes_that_one_still_needs_are_not_replaced_until_it_releases_them(shm: Path) -> None:
    first, second = opened(), opened()
    hold(first, "version 1", 1.0)

    with pytest.raises(WaitTimeoutError, match="another version"):
        hold(second, "version 2", 2.0, deadline_s=0.05)
    assert (first.tensors["a"] == 1.0).all()

    first.release()
    assert hold(second, "version 2", 2.0)


def test_who_waits_can_give_up(shm: Path) -> None:
    first, second = opened(), opened()
    hold(first, "version 1", 1.0)

    def give_up() -> None:
        raise KeyError("stopped")

    with pytest.raises(KeyError):
        second.hold("version 2", filling(second, 2.0), deadline_s=10.0, check=give_up)


def test_a_reading_that_fails_leaves_no_version(shm: Path) -> None:
    first, second = opened(), opened()
    hold(first, "version 1", 1.0)
    first.release()

    def fail() -> None:
        first.tensors["a"].fill_(7.0)
        raise OSError("damaged")

    with pytest.raises(OSError, match="damaged"):
        first.hold("version 2", fail, deadline_s=1.0, check=lambda: None)

    assert hold(second, "version 1", 1.0), "the half read bytes still counted as version 1"
    assert (second.tensors["a"] == 1.0).all()


READER = """
import sys, time
from pathlib import Path
from stages.rollout import memory_folder
memory_folder._SHARED_MEMORY = Path(sys.argv[1])
from tests.unit.test_rollout_staging import opened
one = opened()
def fill():
    one.tensors["a"].fill_(7.0)
    print("half", flush=True)
    time.sleep(600)
one.hold("version 1", fill, deadline_s=10.0, check=lambda: None)
"""


def test_a_reader_that_is_killed_half_way_leaves_nothing_wrong(shm: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", READER, str(shm)], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "half\n"
        survivor = opened()
        with pytest.raises(WaitTimeoutError):
            hold(survivor, "version 1", 1.0, deadline_s=0.02)

        reader.send_signal(signal.SIGKILL)
        reader.wait(10)

        assert hold(survivor, "version 1", 1.0)
        assert (survivor.tensors["a"] == 1.0).all()


def test_a_worker_that_starts_anew_finds_the_version_again(shm: Path) -> None:
    first = opened()
    hold(first, "version 1", 1.0)
    del first

    assert not hold(opened(), "version 1", 9.0)


def test_without_room_in_shared_memory_each_worker_has_its_own(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    first, second = opened(), opened()

    assert "no room for a version of the weights: wanted" in first.why_private
    assert hold(first, "version 1", 1.0)
    assert not hold(first, "version 1", 9.0)
    assert hold(second, "version 2", 2.0)
    assert (first.tensors["a"] == 1.0).all()


def test_memory_that_cuda_cannot_register_is_not_used(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
            return 2

    def refuse(result: int) -> None:
        raise torch.cuda.CudaError.__new__(torch.cuda.CudaError, result)

    made: list[bool] = []

    def empty(*size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        made.append(pin_memory)
        return torch.zeros(*size, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    monkeypatch.setattr(torch, "empty", empty)
    forgotten: list[bool] = []
    monkeypatch.setattr("stages.weights.pinning._forget_error", lambda: forgotten.append(True))

    assert "cudaHostRegister of 768 shared bytes" in Staging("run", LAYOUT, for_cuda=True).why_private
    assert made == [True]
    assert forgotten == [True]  # else the engine's next kernel would report it


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_the_folder_and_its_files_belong_to_the_user_alone(shm: Path) -> None:
    hold(opened(), "version 1", 1.0)

    (folder,) = shm.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_a_folder_in_use_outlives_those_that_leave_it(shm: Path) -> None:
    joined = joined_memory_folder("run")
    leave_memory_folder("run")
    sweep_memory_folders()
    assert joined.path.is_dir()

    os.close(joined.users_fd)
    leave_memory_folder("run")
    assert not joined.path.exists()


def test_what_killed_runs_left_is_removed_by_the_next_run_on_the_node(shm: Path) -> None:
    left, used = joined_memory_folder("killed"), joined_memory_folder("alive")
    (left.path / "weights").write_bytes(b"bytes")
    os.close(left.users_fd)

    joined_memory_folder("next")

    assert not left.path.exists()
    assert used.path.is_dir()


def test_leaving_and_joining_at_the_same_time_never_leaves_a_member_without_its_folder(shm: Path) -> None:
    enough = threading.Event()

    def leave() -> None:
        while not enough.is_set():
            leave_memory_folder("run")

    with ThreadPoolExecutor(2) as pool:
        leavers = [pool.submit(leave) for _ in range(2)]
        try:
            for _ in range(200):
                joined = joined_memory_folder("run")
                assert os.path.samestat(os.fstat(joined.users_fd), (joined.path / "users.lock").stat())
                os.close(joined.users_fd)
        finally:
            enough.set()
        for leaver in leavers:
            leaver.result()


def test_a_folder_that_was_made_anew_while_somebody_looked_at_the_old_one_stays(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.close(joined_memory_folder("run").users_fd)
    (folder,) = shm.iterdir()
    lock = fcntl.flock
    members: list[MemoryFolder] = []

    def lock_late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        (folder / "users.lock").unlink()
        members.append(joined_memory_folder("run"))
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    leave_memory_folder("run")

    assert members[0].path.is_dir()
    assert os.path.samestat(os.fstat(members[0].users_fd), (folder / "users.lock").stat())


def test_the_lock_of_a_folder_goes_last(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = joined_memory_folder("run")
    (joined.path / "weights").write_bytes(b"bytes")
    os.close(joined.users_fd)
    seen: list[list[str]] = []
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **_: seen.append(os.listdir(folder)))

    leave_memory_folder("run")

    assert seen == [["users.lock"]]


def test_the_sweep_of_a_dead_run_takes_its_memory_along(shm: Path) -> None:
    os.close(joined_memory_folder("dead").users_fd)  # as the kernel does for a process that was killed
    assert any(shm.iterdir())

    remove_node_folder("dead")

    assert list(shm.iterdir()) == []


def test_the_sweep_of_a_run_leaves_memory_that_somebody_holds(shm: Path) -> None:
    joined = joined_memory_folder("alive")

    remove_node_folder("alive")

    assert joined.path.is_dir()
    os.close(joined.users_fd)


def test_a_folder_of_somebody_else_is_not_joined(shm: Path) -> None:
    joined = joined_memory_folder("run")
    joined.path.chmod(0o755)

    assert "is not a folder of user" in opened().why_private


def test_killed_runs_leave_locks_that_the_kernel_frees(shm: Path) -> None:
    script = READER.replace("time.sleep(600)", "time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", script, str(shm)], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        leave_memory_folder("run")
        assert any(shm.iterdir())
        reader.kill()
        reader.wait(10)

    def is_gone() -> bool | None:
        leave_memory_folder("run")
        return None if any(shm.iterdir()) else True

    wait_for(is_gone, deadline_s=5, awaited="the kernel's release of the lock", from_whom="a killed process")


def test_a_folder_that_is_open_to_others_is_nobody_s_to_empty(shm: Path) -> None:
    os.close(joined_memory_folder("ours").users_fd)
    (folder,) = shm.iterdir()
    folder.chmod(0o777)

    sweep_memory_folders()
    leave_memory_folder("ours")

    assert [path.name for path in folder.iterdir()] == ["users.lock"]


@pytest.mark.parametrize("name", [b"\xff\xfe", b"\0" * 40, b"version 1 on its way", b"x" * 400])
def test_bytes_with_a_damaged_name_are_read_anew(shm: Path, name: bytes) -> None:
    one = opened()
    hold(one, "version 1", 1.0)
    one.release()
    (lock,) = shm.glob("*/weights-*.lock")
    lock.write_bytes(name)

    assert hold(one, "version 1", 2.0)
    assert lock.read_text() == "version 1"
