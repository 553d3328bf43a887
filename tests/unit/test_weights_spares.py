"""Files that are written over: a version gets those of one that nobody needs, and they go when nobody will."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.context import StageContext
from stages.rundir import RunDir
from stages.weights import spares
from stages.weights.collect import collect, sweep_leftovers
from stages.weights.errors import NoSpaceError
from stages.weights.filesystems import is_quicker_written_over
from stages.weights.mapped_files import MappedFiles
from stages.weights.publish import Publisher
from stages.weights.ranks import RankGroup
from tests.faulty_files import Failing, FaultyFiles
from tests.weights_kit import as_writer, make_context, make_publisher, register, run_ranks, small_tensors
from tests.weights_spares_kit import (
    FILE,
    assert_published,
    context,
    inode,
    on_any_filesystem,
    publish,
    publisher,
    run,
    spare_names,
    with_spare,
)

__all__ = ["context", "on_any_filesystem", "publisher", "run"]


# ---- what is written over --------------------------------------------------------------------------------------------


def test_a_version_is_written_over_the_files_of_one_that_was_collected(run: RunDir, publisher: Publisher) -> None:
    publish(publisher, 1)
    first = inode(run, 1)
    publish(publisher, 2)
    publish(publisher, 3)
    collect(make_context(run))

    publish(publisher, 4)

    assert inode(run, 4) == first
    assert_published(run, 4, small_tensors(4))
    assert_published(run, 3, small_tensors(3))
    sweep_leftovers(run, run.weights)  # as a collection does
    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000002", "v000003", "v000004"]


def test_nothing_is_deleted_while_a_version_is_published(run: RunDir, publisher: Publisher) -> None:
    with_spare(publisher)

    with FaultyFiles(run.root) as files:
        publish(publisher, 4)
        assert files.counts["remove"] == 0
        collect(make_context(run))
        assert files.counts["remove"] > 0

    assert [name for name in os.listdir(run.weights) if ".trash-" in name] == []


def test_nothing_is_kept_or_written_over_where_versions_are_published_as_what_changed(run: RunDir) -> None:
    context = make_context(run)
    context.config.weights.delta = "sparse"
    with make_publisher(run, delta="sparse") as publisher:
        for version in range(
            1, 21
        ):  # the 17th is in full again, so that its base and those before are nobody's any more
            publish(publisher, version)
        assert 1 in collect(context).versions

        assert spare_names(run) == []
        left = with_a_spare_of_somebody(run)
        publish(publisher, 21)

    assert not any(name.startswith(".") for name in os.listdir(run.weights_version(21)))
    assert left not in os.listdir(run.weights_version(21))


def with_a_spare_of_somebody(run: RunDir) -> str:
    """As one kept before `weights.delta` was changed on a resume would look; the name of its file."""
    spare = run.weights / f".v000001.spare-{run.attempt}-00"
    spare.mkdir()
    (spare / "old.safetensors").write_bytes(b"old")
    return "old.safetensors"


def test_at_most_one_version_is_kept(run: RunDir, publisher: Publisher, context: StageContext) -> None:
    for version in range(1, 6):
        publish(publisher, version)

    assert collect(context).versions == (1, 2, 3)
    assert [name.partition(".spare-0-")[0] for name in spare_names(run)] == [".v000001"]
    publish(publisher, 6)
    assert collect(context).versions == (4,)
    assert [name.partition(".spare-0-")[0] for name in spare_names(run)] == [".v000004"]


def test_a_leased_version_is_not_written_over(run: RunDir, publisher: Publisher, context: StageContext) -> None:
    register(run, "rollout_000", version=3, leases=(1,))
    for version in (1, 2, 3):
        publish(publisher, version)

    assert collect(context).versions == ()
    publish(publisher, 4)
    assert collect(context).versions == (2,)
    assert_published(run, 1, small_tensors(1))


@pytest.mark.parametrize("grows", [True, False], ids=["longer", "shorter"])
def test_files_of_another_length_become_those_of_the_version(run: RunDir, publisher: Publisher, grows: bool) -> None:
    def tensors(version: int) -> dict[str, torch.Tensor]:
        size = 5000 if (version == 4) == grows else 50
        return {"a": torch.full((size,), float(version)), "b": torch.arange(7.0) + version}

    with_spare(publisher, tensors)

    publish(publisher, 4, tensors(4))

    assert_published(run, 4, tensors(4))


def test_files_that_the_version_does_not_have_go(run: RunDir) -> None:
    """Six files, one for each tensor and the small one; then one file for all."""
    with make_publisher(run, max_file_bytes=1) as publisher:
        with_spare(publisher)
    for version in (4, 5):
        with make_publisher(run) as publisher:
            assert spares.keep(run, run.weights_version(version - 2))
            publish(publisher, version)
            assert sorted(os.listdir(run.weights_version(version))) == [
                "config.json", "manifest.json", FILE, "tokenizer.json",
            ]  # fmt: skip
            assert_published(run, version, small_tensors(version))


def test_all_ranks_write_over_the_same_files(run: RunDir) -> None:
    def body(group: RankGroup) -> list[int]:
        inodes = []
        with make_publisher(run, group) as publisher:
            for version in (1, 2, 3, 4):
                owned = list(small_tensors(version).items())[group.rank :: 2]
                publish(publisher, version, dict(owned))
                inodes.append(inode(run, version))
                group.gather(b"")
                if group.rank == 0:
                    collect(make_context(run))
        return inodes

    inodes = run_ranks(2, body)[0].result()

    assert inodes[3] == inodes[0]
    assert_published(run, 4, small_tensors(4))


def test_nothing_is_kept_where_that_is_not_known_to_be_quicker(
    run: RunDir, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.weights.spares.is_quicker_written_over", is_quicker_written_over)
    monkeypatch.setattr("stages.weights.filesystems.filesystem_magic", lambda _: 0x6969)  # nfs

    with_spare(publisher)

    assert spare_names(run) == []


def test_what_is_kept_counts_as_space_for_the_version_that_gets_it(
    run: RunDir, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tensors(version: int) -> dict[str, torch.Tensor]:
        return {"a": torch.full((1_000_000,), float(version))}

    with_spare(publisher, tensors)
    monkeypatch.setattr("stages.weights.publication.available_bytes", lambda folder: 2_000_000)

    publish(publisher, 4, tensors(4))
    with pytest.raises(NoSpaceError):
        publish(publisher, 5, tensors(5))


# ---- when it goes ----------------------------------------------------------------------------------------------------


def test_what_is_kept_goes_when_the_publisher_closes(run: RunDir) -> None:
    with make_publisher(run) as publisher:
        with_spare(publisher)
        assert len(spare_names(run)) == 1

    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000002", "v000003"]


def test_the_next_attempt_removes_it_and_does_not_write_over_it(run: RunDir, tmp_path: Path) -> None:
    with_spare(make_publisher(run))
    run.start_attempt(1)
    later = as_writer(RunDir.open(run.root, writer="trainer"), "trainer")
    target = tmp_path / "target"
    target.mkdir()

    assert spares.take(later, target, MappedFiles(torch.device("cpu"))) == 0
    assert os.listdir(target) == []
    (name,) = spare_names(run)
    assert sweep_leftovers(later, run.weights) == (name,)
    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000002", "v000003"]


def test_a_publication_that_fails_leaves_nothing_of_it(run: RunDir, publisher: Publisher) -> None:
    with_spare(publisher)

    with FaultyFiles(run.root, [Failing("write", f"weights/.v000004.tmp-*/{FILE}", errno.ENOSPC)]):
        with pytest.raises(NoSpaceError):
            publish(publisher, 4)

    sweep_leftovers(run, run.weights)  # as a collection does
    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000002", "v000003"]
    publish(publisher, 5)
    assert_published(run, 5, small_tensors(5))


def test_space_that_somebody_frees_by_hand_is_not_missed(
    run: RunDir, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_spare(publisher)
    lstat = os.lstat

    def freeing(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(FILE) and ".spare-" in str(path):
            os.unlink(path)
        return lstat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", freeing)
        publish(publisher, 4)

    assert_published(run, 4, small_tensors(4))
