"""What a trainer tells of a version that it is writing, and who finds it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages.files import wait_for
from stages.rundir import RunDir
from stages.weights import filesystems, progress
from stages.weights.progress import ProgressReader, ProgressWriter, Stretch, unfinished
from stages.weights.publication import Publication
from stages.weights.publish import Publisher
from stages.weights.tensors import LocalTensor
from tests.weights_kit import PROBE, make_publisher, run_ranks, small_tensors

LIMIT_S = 10.0
TMPFS, EXT4, NFS = 0x0102_1994, 0xEF53, 0x6969


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a trainer with a GPU does."""
    monkeypatch.setattr(Publisher, "tells_progress", True)


@pytest.fixture
def publisher(run: RunDir, tells: None) -> Iterator[Publisher]:
    with make_publisher(run) as made:
        yield made


def awaited(what: str, look: Callable[[], Any]) -> Any:
    return wait_for(lambda: look() or None, deadline_s=LIMIT_S, awaited=what, from_whom="a thread")


def written(publisher: Publisher, version: int) -> Publication:
    """All bytes are in the files, and the version has no name yet."""
    owned = [LocalTensor.whole(name, tensor) for name, tensor in small_tensors(version).items()]
    publication = publisher.begin(version, version, owned, PROBE)
    awaited("the writers", lambda: all(worker.done() for worker in publication._writer._workers))
    return publication


def a_folder(run: RunDir, name: str) -> Path:
    folder = run.weights / name
    folder.mkdir(parents=True)
    ProgressWriter(folder, 0).tell()
    return folder


def test_the_newest_version_that_this_attempt_writes_is_looked_for(run: RunDir) -> None:
    assert unfinished(run, -1) is None
    for name in (
        ".v000009.tmp-3-0123abcd",
        ".v000010.trash-0123abcd",
        ".v000011.spare-0-0123abcd",
        ".v000007.tmp-0-01",
    ):
        a_folder(run, name)
    newest = a_folder(run, ".v000008.tmp-0-0123abcd")
    (run.weights / ".v000012.tmp-0-0123abcd").mkdir()  # of a trainer that tells nothing

    assert unfinished(run, 7) == (8, newest)
    assert unfinished(run, 8) is None


def test_what_somebody_put_there_under_such_a_name_is_left_alone(run: RunDir, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    ProgressWriter(outside, 0).tell()
    (run.weights / ".v000009.tmp-0-0123abcd").write_text("")
    (run.weights / ".v000010.tmp-0-0123abcd").symlink_to(outside)
    (run.weights / ".v000011.tmp-0-0123abcd").symlink_to(".v000011.tmp-0-0123abcd")
    newest = a_folder(run, ".v000008.tmp-0-0123abcd")

    assert unfinished(run, 7) == (8, newest)


def test_lines_of_a_rank_that_ends_while_they_are_looked_for_are_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, writer = ProgressWriter(tmp_path, 0), ProgressWriter(tmp_path, 1)
    stretch = Stretch("a", "model.safetensors", 0, 0, 8)
    writer.add(stretch)
    ended.tell()
    writer.tell()
    names = os.listdir(tmp_path)
    ended.close()
    monkeypatch.setattr(os, "listdir", lambda _: names)

    assert ProgressReader(tmp_path).new() == [stretch]


def test_nothing_of_it_is_left_in_a_version_or_after_one_that_failed(run: RunDir, publisher: Publisher) -> None:
    publication = written(publisher, 1)
    assert list(publication._path.glob(".parts.*"))
    publication.finish()
    with make_publisher(run) as failing:
        written(failing, 2).close()

    assert not list(run.weights.rglob(".parts.*"))
    assert not list(run.weights.glob(".v*tmp*"))


def test_nobody_hears_of_a_part_while_training_still_waits_for_the_copies(tmp_path: Path) -> None:
    stretch, later = (Stretch("a", "model.safetensors", row * 8, row * 8, 8) for row in (0, 1))
    writer, lines = ProgressWriter(tmp_path, 0), ProgressReader(tmp_path)
    writer.add(stretch)
    assert lines.new() == []

    writer.tell()
    assert lines.new() == [stretch]
    writer.add(later)
    assert lines.new() == [later]

    writer.close()
    assert not list(tmp_path.iterdir())


def test_a_publication_that_is_over_before_it_may_tell_leaves_nothing(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path, 0)
    writer.add(Stretch("a", "model.safetensors", 0, 0, 8))

    writer.close()
    writer.tell()

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", ["open", "write"])
def test_a_hint_for_which_there_is_no_room_is_said_once_and_fails_no_version(
    run: RunDir,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails: str,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(progress, "os", SimpleNamespace(**{**vars(os), fails: full}))
    publication = written(publisher, 1)

    assert publication.finish().version == 1
    assert not list(run.weights.rglob(".parts.*"))
    assert capsys.readouterr().out.count("readers are not told what of .v000001.tmp-0") == 1


def test_each_rank_tells_of_its_own_parts_and_only_of_those_in_one_piece(run: RunDir, tells: None) -> None:
    found: list[Stretch] = []

    def publish(ranks: Any) -> None:
        publisher = make_publisher(run, ranks)
        rows = torch.arange(32.0).reshape(4, 8)[ranks.rank * 2 :][:2]
        columns = torch.arange(32.0).reshape(4, 8)[:, ranks.rank * 4 :][:, :4]
        owned = [
            LocalTensor.along("rows", (4, 8), 0, ranks.rank * 2, rows),
            LocalTensor.along("columns", (4, 8), 1, ranks.rank * 4, columns.contiguous()),
        ]
        publication = publisher.begin(1, 1, owned, PROBE)
        awaited("the writers", lambda: all(worker.done() for worker in publication._writer._workers))
        ranks.gather(b"")
        if ranks.rank == 0:
            found.extend(ProgressReader(publication._path).new())
        ranks.gather(b"")
        publication.finish()
        publisher.close()

    for done in run_ranks(2, publish):
        done.result()

    assert sorted((stretch.name, stretch.first, stretch.length) for stretch in found) == [
        ("rows", 0, 64),
        ("rows", 64, 64),
    ]


def test_a_line_that_is_still_being_written_waits_for_its_end(tmp_path: Path) -> None:
    whole = json.dumps(["a", "model.safetensors", 0, 0, 8])
    (tmp_path / ".parts.0.jsonl").write_text(whole[:10])
    lines = ProgressReader(tmp_path)

    assert lines.new() == []
    (tmp_path / ".parts.0.jsonl").write_text(whole + "\n")

    assert lines.new() == [Stretch("a", "model.safetensors", 0, 0, 8)]
    assert lines.new() == []
    lines.close()


@pytest.mark.parametrize(
    ("magic", "device", "tells"),
    [(EXT4, "cuda", True), (NFS, "cuda", False), (EXT4, "cpu", False), (TMPFS, "cuda", False)],
)
def test_only_a_trainer_with_a_gpu_tells_and_only_on_a_disk_of_its_host(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, magic: int, device: str, tells: bool
) -> None:
    monkeypatch.setattr(filesystems, "filesystem_magic", lambda _: magic)
    publisher = make_publisher(run)
    monkeypatch.setattr(type(publisher.copier), "is_cuda", device == "cuda")

    assert publisher.tells_progress is tells
