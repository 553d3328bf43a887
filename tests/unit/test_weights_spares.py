"""Files that are written over: a version gets those of one that nobody needs, and whoever still has one of them keeps what he has."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.sections import WeightsConfig
from stages.context import StageContext
from stages.rundir import RunDir
from stages.weights import spares
from stages.weights.collect import collect, sweep_leftovers
from stages.weights.errors import DigestMismatchError, NoSpaceError
from stages.weights.filesystems import is_quicker_written_over
from stages.weights.manifest import Manifest
from stages.weights.publish import Publisher
from stages.weights.ranks import RankGroup
from stages.weights.reader import load_manifest, read_verified, verify
from stages.weights.tensors import LocalTensor
from tests.faulty_files import Failing, FaultyFiles, Torn
from tests.weights_kit import PROBE, as_writer, make_context, make_source, register, run_ranks, small_tensors

FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def on_any_filesystem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.weights.spares.is_quicker_written_over", lambda folder: True)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), "trainer")


@pytest.fixture
def context(run: RunDir) -> StageContext:
    return make_context(run)


@pytest.fixture
def publisher(run: RunDir) -> Iterator[Publisher]:
    with make_publisher(run) as made:
        yield made


def make_publisher(run: RunDir, ranks: RankGroup | None = None, **options: Any) -> Publisher:
    chosen = WeightsConfig(**{"dtype": "float32", **options})
    return Publisher(run, source_folder=make_source(run.root.parent / "source"), options=chosen, ranks=ranks)


def publish(publisher: Publisher, version: int, tensors: dict[str, torch.Tensor] | None = None) -> Manifest:
    chosen = small_tensors(version) if tensors is None else tensors
    whole = [LocalTensor.whole(name, tensor) for name, tensor in chosen.items()]
    return publisher.begin(version, version, whole, PROBE).finish()


def with_spare(publisher: Publisher, tensors: Callable[[int], dict[str, torch.Tensor]] = small_tensors) -> Path:
    """Versions 1 to 3, of which the first is collected: its files are kept. The file of version 1, as it was called."""
    for version in (1, 2, 3):
        publish(publisher, version, tensors(version))
    assert collect(make_context(publisher.run)).versions == (1,)
    return publisher.run.weights_version(1) / FILE


def inode(run: RunDir, version: int) -> int:
    return os.stat(run.weights_version(version) / FILE).st_ino


def spare_names(run: RunDir) -> list[str]:
    return [name for name in os.listdir(run.weights) if ".spare-" in name]


def assert_published(run: RunDir, version: int, tensors: dict[str, torch.Tensor]) -> None:
    manifest = load_manifest(run, version)
    verify(run, manifest)
    read = read_verified(run, manifest)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


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
    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000002", "v000003", "v000004"]


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


# ---- whoever still has a file ----------------------------------------------------------------------------------------


def test_who_has_a_file_open_reads_the_old_version_to_its_end(run: RunDir, publisher: Publisher) -> None:
    publish(publisher, 1)
    path = run.weights_version(1) / FILE
    before = path.read_bytes()
    with path.open("rb") as reader:
        publish(publisher, 2)
        publish(publisher, 3)
        collect(make_context(run))

        publish(publisher, 4)

        assert reader.read() == before
    assert_published(run, 4, small_tensors(4))


def test_who_has_a_file_mapped_keeps_its_bytes_though_it_is_closed(run: RunDir, publisher: Publisher) -> None:
    """As an engine's loader that is still at it: it maps safetensors files."""
    publish(publisher, 1)
    path = run.weights_version(1) / FILE
    before = path.read_bytes()
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    publish(publisher, 2)
    publish(publisher, 3)
    collect(make_context(run))

    publish(publisher, 4)

    assert mapped[:] == before
    mapped.close()
    assert_published(run, 4, small_tensors(4))


def test_a_second_name_of_a_file_keeps_its_bytes(run: RunDir, publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, 1)
    os.link(run.weights_version(1) / FILE, tmp_path / "mine")
    before = (tmp_path / "mine").read_bytes()
    publish(publisher, 2)
    publish(publisher, 3)
    collect(make_context(run))

    publish(publisher, 4)

    assert (tmp_path / "mine").read_bytes() == before
    assert_published(run, 4, small_tensors(4))


def test_a_file_that_somebody_protects_stays_as_it_is(run: RunDir, publisher: Publisher, tmp_path: Path) -> None:
    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(FILE) and not flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "protected", str(path))
        return real(path, flags, *arguments, **options)

    with_spare(publisher)
    real = os.open
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", refuse)
        publish(publisher, 4)

    assert_published(run, 4, small_tensors(4))


def test_where_the_kernel_cannot_tell_nothing_is_written_over(
    run: RunDir, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_leases(fd: int, command: int, *arguments: Any) -> Any:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, "no leases")
        return real(fd, command, *arguments)

    with_spare(publisher)
    target = tmp_path / "target"
    target.mkdir()
    real = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", without_leases)

    assert spares.take(run, target) == 0
    assert os.listdir(target) == spare_names(run) == []


def test_an_opening_in_the_very_moment_of_the_question_ends_no_process(
    run: RunDir, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another descriptor, opened while the lease is held, breaks it: the signal for that must be one that is ignored."""
    real, opened = fcntl.fcntl, []

    def opening(fd: int, command: int, *arguments: Any) -> Any:
        if command == fcntl.F_SETLEASE and arguments == (fcntl.F_UNLCK,):
            path = os.readlink(f"/proc/self/fd/{fd}")
            with pytest.raises(BlockingIOError):  # it breaks the lease, and does not wait for that
                os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            opened.append(path)
        return real(fd, command, *arguments)

    with_spare(publisher)
    monkeypatch.setattr(fcntl, "fcntl", opening)
    publish(publisher, 4)

    assert len(opened) == 1
    assert_published(run, 4, small_tensors(4))


def test_links_and_folders_among_the_files_are_not_taken(run: RunDir, publisher: Publisher, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    publish(publisher, 1)
    (run.weights_version(1) / "link.safetensors").symlink_to(outside)
    (run.weights_version(1) / "folder.safetensors").mkdir()
    publish(publisher, 2)
    publish(publisher, 3)
    collect(make_context(run))

    publish(publisher, 4)

    assert outside.read_text() == "mine"
    assert spare_names(run) == []
    assert_published(run, 4, small_tensors(4))


def test_bytes_that_were_not_stored_are_found_out_over_an_old_version_too(run: RunDir, publisher: Publisher) -> None:
    """The place holds bytes of a whole older version, the same number of them."""
    with_spare(publisher)

    header, tensor = (Torn(f"weights/.v000004.tmp-*/{FILE}", keep) for keep in (10**6, 2))
    with FaultyFiles(run.root, [header, tensor]):
        manifest = publish(publisher, 4)

    with pytest.raises(DigestMismatchError):
        read_verified(run, manifest)


def test_a_reader_that_sees_a_file_change_refuses_it(run: RunDir, publisher: Publisher) -> None:
    """However that came about: here the new version's file gets the old one's place."""
    manifest = publish(publisher, 1)
    publish(publisher, 2)
    new, old = (run.weights_version(version) / FILE for version in (2, 1))
    old.write_bytes(new.read_bytes()[:-4] + old.read_bytes()[-4:])

    with pytest.raises(DigestMismatchError):
        read_verified(run, manifest)


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

    assert spares.take(later, target) == 0
    assert os.listdir(target) == []
    (name,) = spare_names(run)
    assert sweep_leftovers(later, run.weights) == (name,)
    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000002", "v000003"]


def test_a_publication_that_fails_leaves_nothing_of_it(run: RunDir, publisher: Publisher) -> None:
    with_spare(publisher)

    with FaultyFiles(run.root, [Failing("write", f"weights/.v000004.tmp-*/{FILE}", errno.ENOSPC)]):
        with pytest.raises(NoSpaceError):
            publish(publisher, 4)

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
