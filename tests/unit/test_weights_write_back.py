"""A published version is written to its disk afterwards, where nobody flushed it before."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.files import wait_for
from stages.rundir import RunDir
from stages.weights import filesystems, write_back
from stages.weights.tensors import LocalTensor
from stages.weights.write_back import WriteBack
from tests.weights_kit import PROBE, make_publisher, small_tensors

LIMIT_S = 10.0
TMPFS, EXT4, NFS = 0x0102_1994, 0xEF53, 0x6969


class Disk:
    """Stands in for sync_file_range of files in `folder`. `gate` keeps it from coming back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: list[tuple[str, int]] = []
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()
        self.problem: OSError | None = None

    def write_piece(self, fd: int, begin: int, length: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not path.is_relative_to(self.folder):
            return  # of a publisher that another test left open
        with self.lock:
            self.written.append((path.name, begin))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        assert self.gate.wait(LIMIT_S)
        with self.lock:
            self.under_way -= 1
        if self.problem is not None:
            raise self.problem


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    monkeypatch.setattr(write_back, "write_piece", disk.write_piece)
    monkeypatch.setattr(write_back, "_PIECE_BYTES", 6)
    monkeypatch.setattr(write_back, "_BEGIN_AFTER_S", 0.0)
    yield disk
    disk.gate.set()


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return a_version(tmp_path / "v000001")


def a_version(folder: Path) -> Path:
    folder.mkdir()
    for name in ("model-00001.safetensors", "model-00002.safetensors", "config.json"):
        (folder / name).write_bytes(b"0" * 10)
    return folder


def awaited(what: str, look: Callable[[], bool]) -> None:
    wait_for(lambda: look() or None, deadline_s=LIMIT_S, awaited=what, from_whom="a thread")


def no_thread() -> bool:
    return not any(thread.name == "write-back" for thread in threading.enumerate())


def test_every_weight_file_is_written_and_no_other(disk: Disk, version: Path) -> None:
    WriteBack().begin(version)

    awaited("its end", no_thread)
    assert disk.written == [(f"model-0000{number}.safetensors", begin) for number in (1, 2) for begin in (0, 6)]


def test_the_kernel_takes_the_call_for_a_file_and_says_why_not_for_anything_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0" * 10)
    with (tmp_path / "file").open("rb") as file:
        write_back.write_piece(file.fileno(), 0, 6)
        write_back.write_piece(file.fileno(), 6, 6)
    reading, writing = os.pipe()

    with pytest.raises(OSError, match="Illegal seek"):
        write_back.write_piece(reading, 0, 6)

    os.close(reading)
    os.close(writing)


def test_a_newer_version_takes_the_place_of_one_that_a_slow_disk_still_writes(
    disk: Disk, version: Path, tmp_path: Path
) -> None:
    disk.gate.clear()
    writer = WriteBack()
    writer.begin(version)
    awaited("the first piece", lambda: bool(disk.written))

    writer.begin(a_version(tmp_path / "v000002"))
    disk.gate.set()

    awaited("its end", no_thread)
    assert len(disk.written) == 1 + 4


def test_a_slow_disk_has_one_piece_at_a_time(disk: Disk, tmp_path: Path) -> None:
    disk.gate.clear()
    writer = WriteBack()
    for version in range(4):
        writer.begin(a_version(tmp_path / f"v{version:06d}"))
        awaited("the first piece", lambda: bool(disk.written))
    disk.gate.set()

    awaited("its end", no_thread)
    assert disk.most_under_way == 1
    assert len(disk.written) == 1 + 4


def test_it_ends_with_its_publisher_after_the_piece_under_way(disk: Disk, version: Path) -> None:
    disk.gate.clear()
    writer = WriteBack()
    writer.begin(version)
    awaited("the first piece", lambda: bool(disk.written))

    writer.stop()
    disk.gate.set()

    awaited("its end", no_thread)
    assert disk.written == [("model-00001.safetensors", 0)]


def test_nothing_is_written_while_instances_take_the_version_over(
    disk: Disk, version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "_BEGIN_AFTER_S", LIMIT_S)
    writer = WriteBack()
    writer.begin(version)

    writer.stop()

    awaited("its end", no_thread)
    assert disk.written == []


def test_a_disk_that_fails_is_said_and_ends_nothing(
    disk: Disk, version: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.problem = OSError(errno.EIO, os.strerror(errno.EIO))
    WriteBack().begin(version)

    awaited("its end", no_thread)
    assert "v000001 was not written back to its disk: [Errno 5]" in capsys.readouterr().out


def test_where_no_thread_is_to_be_had_the_kernel_does_it(
    version: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    WriteBack().begin(version)

    assert "v000001 is written to its disk when the kernel likes: can't start" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_version_that_is_collected_meanwhile_is_none_of_its_business(
    disk: Disk, version: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    gone = version if what == "folder" else version / "model-00001.safetensors"
    if what == "file":
        names = os.listdir(version)
        monkeypatch.setattr(os, "listdir", lambda _: names)
    gone.rename(gone.with_name("elsewhere"))
    WriteBack().begin(version)

    awaited("its end", no_thread)
    assert capsys.readouterr().out == ""


@pytest.mark.exercises("weights.fsync")
@pytest.mark.parametrize(
    ("magic", "policy", "writes_back"),
    [
        (EXT4, "auto", True),
        (EXT4, "never", False),
        (EXT4, "always", False),
        (TMPFS, "auto", False),
        (NFS, "auto", False),
    ],
)
def test_only_what_lies_on_a_disk_of_this_host_and_was_not_flushed_is_written_back(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, magic: int, policy: str, writes_back: bool
) -> None:
    monkeypatch.setattr(filesystems, "filesystem_magic", lambda _: magic)
    with make_publisher(RunDir.create(tmp_path / "run"), fsync=policy) as publisher:
        owned = [LocalTensor.whole(name, tensor) for name, tensor in small_tensors().items()]
        publisher.begin(1, 1, owned, PROBE).finish()
        awaited("its end", no_thread)

    assert bool(disk.written) is writes_back
