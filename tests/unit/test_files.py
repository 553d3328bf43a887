"""stages.files: records appear whole, are found on slow filesystems, and no wait is endless."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages import files
from stages.files import (
    DamagedRecordError,
    WaitTimeoutError,
    fsync_paths,
    json_text,
    list_names,
    make_directory,
    read_json,
    remove_tree,
    wait_for,
    write_bytes_atomic,
    write_json_atomic,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(payload=st.dictionaries(st.text(), JSON, max_size=4))
def test_json_text_says_what_the_payload_says(payload: dict[str, Any]) -> None:
    assert json.loads(json_text(payload)) == payload


def test_a_record_has_mode_0600_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_json_atomic(tmp_path / "record.json", {"a": 1})
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "record.json").stat().st_mode) == 0o600


def test_bytes_are_durable_before_the_rename_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(fd: int) -> None:
        calls.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def logged_replace(source: Path, target: Path) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)

    write_bytes_atomic(tmp_path / "record", b"1")

    assert calls == ["file", "replace", "directory"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_record_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "record.json"
    write_json_atomic(path, {"a": 1})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, function, full)
    with pytest.raises(OSError, match="no space"):
        write_json_atomic(path, {"a": 2})

    assert read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["record.json"]


def test_without_flush_nothing_is_flushed_and_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("flushed"))
    path = tmp_path / "record"

    for data in (b"a longer one", b"short", b""):
        write_bytes_atomic(path, data, flush=False)
        assert path.read_bytes() == data

    assert os.listdir(tmp_path) == ["record"]


def test_without_flush_the_end_of_the_old_file_is_left_to_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, closers, closed = tmp_path / "record", list[int](), threading.Event()
    close = os.close

    def noting(fd: int) -> None:
        is_old = os.readlink(f"/proc/self/fd/{fd}") == f"{path} (deleted)"
        close(fd)
        if is_old:
            closers.append(threading.get_ident())
            closed.set()

    write_bytes_atomic(path, b"old", flush=False)
    monkeypatch.setattr(os, "close", noting)
    write_bytes_atomic(path, b"new", flush=False)

    assert closed.wait(10.0)
    assert closers != [threading.get_ident()]


def test_without_flush_a_record_is_replaced_where_no_thread_is_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    path = tmp_path / "record"
    write_bytes_atomic(path, b"old", flush=False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = len(os.listdir("/proc/self/fd"))

    write_bytes_atomic(path, b"new", flush=False)

    assert path.read_bytes() == b"new"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("flush", [True, False])
def test_a_full_disk_is_reported_with_the_record_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(OSError, match=r"no space.*record\.json"):
        write_json_atomic(tmp_path / "record.json", {"a": 1}, flush=flush)


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("target", ["nowhere", "record", "elsewhere", "fifo"])
def test_a_link_in_the_place_of_a_record_is_replaced_and_not_followed(tmp_path: Path, target: str, flush: bool) -> None:
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    os.mkfifo(tmp_path / "fifo")
    path = tmp_path / "record"
    path.symlink_to(target)

    write_bytes_atomic(path, b"ours", flush=flush)

    assert not path.is_symlink()
    assert path.read_bytes() == b"ours"
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"


def test_a_failed_replacement_without_flush_leaves_the_old_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record"
    write_bytes_atomic(path, b"old", flush=False)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_bytes_atomic(path, b"new", flush=False)

    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["record"]


def test_concurrent_readers_see_one_whole_record_or_another(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json_atomic(path, {"a": "0" * 5000, "b": "0"})
    done = threading.Event()
    seen: list[bool] = []

    def read() -> None:
        while not done.is_set():
            record = read_json(path)
            seen.append(record is not None and set(record["a"]) == set(record["b"]))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(50):
        write_json_atomic(path, {"a": str(number % 10) * 5000, "b": str(number % 10)})
    done.set()
    reader.join()

    assert seen
    assert all(seen)


def test_a_missing_record_is_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "record.json") is None
    assert read_json(tmp_path / "nowhere" / "record.json") is None


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"[1]", b"\x00", b"\xff"])
def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record.json").write_bytes(content)

    with pytest.raises(DamagedRecordError, match=r"record\.json"):
        read_json(tmp_path / "record.json")


def test_a_record_that_the_client_remembers_as_missing_is_found_through_the_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    write_json_atomic(path, {"a": 1})
    _fail_first_reads(monkeypatch, 1, FileNotFoundError(errno.ENOENT, "remembered"))

    assert read_json(path) == {"a": 1}


def test_a_record_replaced_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    write_json_atomic(path, {"a": 1})
    _fail_first_reads(monkeypatch, 2, OSError(errno.ESTALE, "stale"))

    assert read_json(path) == {"a": 1}


def test_a_record_that_stays_stale_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json_atomic(tmp_path / "record.json", {"a": 1})
    _fail_first_reads(monkeypatch, 100, OSError(errno.ESTALE, "stale"))

    with pytest.raises(OSError, match="stale"):
        read_json(tmp_path / "record.json")


def test_listing_is_sorted_and_hides_temporaries(tmp_path: Path) -> None:
    for name in ("b", "a", ".a.1234.tmp"):
        (tmp_path / name).touch()

    assert list_names(tmp_path) == ["a", "b"]
    assert list_names(tmp_path / "nowhere") == []


def test_a_directory_and_its_new_parents_are_closed_to_others(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")

    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_file_in_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").touch()

    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "a")


def test_an_error_of_any_fsync_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a").touch()

    with pytest.raises(FileNotFoundError):
        fsync_paths([tmp_path / "a", tmp_path / "b", tmp_path])


@pytest.mark.parametrize("code, gone", [(errno.ENOTEMPTY, False), (errno.EBUSY, False), (None, True)])
def test_a_tree_that_someone_still_reads_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, gone: bool
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, "in use")

    if code is not None:
        monkeypatch.setattr(os, "rmdir", refuse)

    assert remove_tree(tmp_path / "a") is gone
    assert (tmp_path / "a").exists() is not gone


def test_a_tree_that_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        remove_tree(tmp_path / "nowhere")


def test_waiting_ends_with_what_was_found() -> None:
    answers = iter([None, None, "there"])

    assert wait_for(lambda: next(answers), deadline_s=5, awaited="it", from_whom="them") == "there"


def test_a_falsy_find_is_a_find() -> None:
    assert wait_for(lambda: 0, deadline_s=0, awaited="it", from_whom="them") == 0


def test_the_deadline_error_names_what_was_awaited_from_whom_and_how_long(fake_clock: FakeClock) -> None:
    with pytest.raises(WaitTimeoutError, match=r"waited 30\.0 s for batch 7 from the controller") as caught:
        wait_for(lambda: None, deadline_s=30, awaited="batch 7", from_whom="the controller")

    assert caught.value.awaited == "batch 7"
    assert caught.value.from_whom == "the controller"


def test_waiting_looks_often_at_first_and_rarely_later(fake_clock: FakeClock) -> None:
    looks: list[float] = []

    with pytest.raises(WaitTimeoutError):
        wait_for(lambda: looks.append(fake_clock.now_s), deadline_s=120, awaited="it", from_whom="them")

    assert sum(at < 5 for at in looks) > 200  # a refresh of a small model takes 0.1 s
    assert sum(at > 60 for at in looks) <= 121  # half a second each
    assert looks[-1] == pytest.approx(120)


def test_a_check_can_end_the_wait(fake_clock: FakeClock) -> None:
    def check() -> None:
        if fake_clock.now_s > 3:
            raise InterruptedError("asked to stop")

    with pytest.raises(InterruptedError):
        wait_for(lambda: None, deadline_s=60, awaited="it", from_whom="them", check=check)

    assert fake_clock.now_s < 4


class FakeClock:
    """Time passes only in sleep."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(files, "time", clock)
    return clock


def _fail_first_reads(monkeypatch: pytest.MonkeyPatch, number: int, error: OSError) -> None:
    left = [number]
    open_path: Callable[..., Any] = Path.open

    def fail(path: Path, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return open_path(path, **options)

    monkeypatch.setattr(Path, "open", fail)
