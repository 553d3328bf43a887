"""The filesystem that misbehaves does so as told, and the product's file functions meet it as they meet real ones."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stages.files import (
    DamagedRecordError,
    WaitTimeoutError,
    list_inodes,
    list_names,
    read_json,
    remove_tree,
    wait_for,
    write_bytes_atomic,
    write_json_atomic,
)
from stages.rundir import RunDir
from stages.weights.errors import DigestMismatchError, NoSpaceError, PublishError
from stages.weights.reader import load_manifest, read_verified, wait_for_manifest
from tests.faulty_files import Failing, FaultyFiles, Late, Slow, Torn
from tests.weights_kit import publish_full, small_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def number(path: Path) -> int | None:
    record = read_json(path)
    return None if record is None else int(record["number"])


# ---- late sight ------------------------------------------------------------------------------------------------------


def test_a_new_name_is_seen_at_once_by_who_made_it_and_late_by_another_host(folder: Path) -> None:
    with FaultyFiles(folder, [Late("*.json", looks=2)]) as files:
        with files.on("node1"):
            write_json_atomic(folder / "a.json", {"number": 1})
            assert list_names(folder) == ["a.json"]
        with files.on("node2"):
            assert [list_names(folder) for _ in range(3)] == [[], [], ["a.json"]]
            assert number(folder / "a.json") == 1


def test_each_other_host_waits_for_itself(folder: Path) -> None:
    with FaultyFiles(folder, [Late("*", looks=1)]) as files:
        with files.on("node1"):
            (folder / "a").mkdir()
        with files.on("node2"):
            assert [list_names(folder) for _ in range(2)] == [[], ["a"]]
        with files.on("node3"):
            assert [os.listdir(folder) for _ in range(2)] == [[], ["a"]]


def test_new_content_under_an_old_name_is_seen_late_with_its_inode_number(folder: Path) -> None:
    write_json_atomic(folder / "a.json", {"number": 1})
    old = list_inodes(folder)
    with FaultyFiles(folder, [Late("a.json", looks=2)]) as files:
        with files.on("node1"):
            write_json_atomic(folder / "a.json", {"number": 2})
        with files.on("node2"):
            assert list_inodes(folder) == old
            assert [number(folder / "a.json") for _ in range(2)] == [1, 2]
            assert list_inodes(folder) != old


def test_what_lies_in_a_folder_that_is_not_seen_is_not_seen(folder: Path) -> None:
    with FaultyFiles(folder, [Late("new", looks=1)]) as files:
        with files.on("node1"):
            (folder / ".tmp").mkdir()
            write_json_atomic(folder / ".tmp" / "a.json", {"number": 1})
            os.rename(folder / ".tmp", folder / "new")
        with files.on("node2"):
            with pytest.raises(FileNotFoundError):
                os.open(folder / "new" / "a.json", os.O_RDONLY)
            assert number(folder / "new" / "a.json") == 1


def test_a_wait_finds_a_version_that_is_seen_late(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    with FaultyFiles(run.root, [Late("weights/v*", looks=4)]) as files:
        with files.on("node1"):
            published = publish_full(run, 1)
        with files.on("node2"):
            found = wait_for_manifest(run, 1, published.digest, deadline_s=20.0)

    assert found == published


def test_a_wait_for_what_never_comes_ends_with_its_deadline(folder: Path) -> None:
    with FaultyFiles(folder, [Late("*", looks=10**6)]) as files:
        with files.on("node1"):
            write_json_atomic(folder / "a.json", {"number": 1})
        with files.on("node2"), pytest.raises(WaitTimeoutError, match="from node1"):
            wait_for(lambda: number(folder / "a.json"), deadline_s=0.02, awaited="a.json", from_whom="node1")


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_record_that_was_replaced_under_the_reader_is_read_again(folder: Path) -> None:
    write_json_atomic(folder / "a.json", {"number": 1})
    with FaultyFiles(folder, [Failing("read", "a.json", errno.ESTALE, times=2)]) as files:
        assert number(folder / "a.json") == 1
        assert files.counts["open"] == 3


def test_a_record_that_stays_stale_is_an_error(folder: Path) -> None:
    write_json_atomic(folder / "a.json", {"number": 1})
    with (
        FaultyFiles(folder, [Failing("read", "a.json", errno.ESTALE, times=9)]),
        pytest.raises(OSError, match="Stale"),
    ):
        read_json(folder / "a.json")


@pytest.mark.parametrize("kind", ["create", "write", "flush", "rename"])
def test_a_record_that_finds_no_space_leaves_the_old_one_and_nothing_else(folder: Path, kind: str) -> None:
    write_json_atomic(folder / "a.json", {"number": 1})
    with FaultyFiles(folder, [Failing(kind, "*a.json*", errno.ENOSPC)]), pytest.raises(OSError, match="No space"):
        write_json_atomic(folder / "a.json", {"number": 2})

    assert number(folder / "a.json") == 1
    assert os.listdir(folder) == ["a.json"]


def test_the_first_operations_may_pass(folder: Path) -> None:
    with FaultyFiles(folder, [Failing("rename", "a.json", errno.EIO, skip=1)]):
        write_json_atomic(folder / "a.json", {"number": 1})
        with pytest.raises(OSError, match="Input/output"):
            write_json_atomic(folder / "a.json", {"number": 2})
        write_json_atomic(folder / "a.json", {"number": 3})

    assert number(folder / "a.json") == 3


def test_a_version_that_finds_no_space_is_not_visible(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    with (
        FaultyFiles(run.root, [Failing("write", "weights/.v000001.tmp-*/*.safetensors", errno.ENOSPC)]),
        pytest.raises((PublishError, NoSpaceError), match="space"),
    ):
        publish_full(run, 1)

    assert os.listdir(run.weights) == []


def test_a_folder_that_is_still_open_on_a_file_server_stays_for_the_next_attempt(folder: Path) -> None:
    (folder / "old").mkdir()
    with FaultyFiles(folder, [Failing("remove", "old", errno.ENOTEMPTY)]):
        assert not remove_tree(folder / "old")
        assert remove_tree(folder / "old")


# ---- content ---------------------------------------------------------------------------------------------------------


def test_a_torn_writing_that_is_reported_leaves_the_old_record(folder: Path) -> None:
    write_json_atomic(folder / "a.json", {"number": 1})
    with FaultyFiles(folder, [Torn(".a.json*", keep=3, error=errno.EIO)]), pytest.raises(OSError, match="Input/output"):
        write_json_atomic(folder / "a.json", {"number": 2})

    assert number(folder / "a.json") == 1


def test_a_torn_record_that_nobody_noticed_is_damage_not_haste(folder: Path) -> None:
    with FaultyFiles(folder, [Torn(".a.json*", keep=3)]):
        write_json_atomic(folder / "a.json", {"number": 2})

    with pytest.raises(DamagedRecordError):
        read_json(folder / "a.json")


def test_a_torn_version_that_nobody_noticed_is_found_by_its_digests(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    with FaultyFiles(run.root, [Torn("weights/.v000001.tmp-*/*.safetensors", keep=8)]):
        manifest = publish_full(run, 1)

    with pytest.raises(DigestMismatchError):
        read_verified(run, manifest)


def test_slow_readings_come_in_pieces_and_are_whole_in_the_end(tmp_path: Path) -> None:
    run, pauses = RunDir.create(tmp_path / "run"), []
    publish_full(run, 1)
    with FaultyFiles(run.root, [Slow("weights/*", most_bytes=100, pause=lambda: pauses.append(1))]):
        tensors = read_verified(run, load_manifest(run, 1))

    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: tensor.tolist() for name, tensor in small_tensors(1).items()
    }
    assert len(pauses) > 10


# ---- the layer itself ------------------------------------------------------------------------------------------------


def test_operations_elsewhere_are_not_touched_and_calls_are_given_back(folder: Path, tmp_path: Path) -> None:
    before = (os.open, os.rename, os.scandir, open)
    with FaultyFiles(folder, [Failing("create", "*", errno.EIO, times=99)]) as files:
        write_bytes_atomic(tmp_path / "elsewhere", b"x")
        assert not files.counts

    assert (os.open, os.rename, os.scandir, open) == before
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "shared"]


def test_removing_a_tree_by_descriptors_is_seen(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "c").touch()
    with FaultyFiles(folder) as files:
        shutil.rmtree(folder / "a")

    assert files.counts["remove"] == 3
    assert files.counts["list"] == 2


def test_operations_of_one_record_are_counted(tmp_path: Path) -> None:
    run = replace(RunDir.create(tmp_path / "run"), writer="trainer")
    with FaultyFiles(run.root) as files:
        run.write(run.request_json(1), {"version": 1})

    assert {kind: files.counts[kind] for kind in ("create", "write", "flush", "rename", "list")} == {
        "create": 1, "write": 1, "flush": 2, "rename": 1, "list": 1,
    }  # fmt: skip
