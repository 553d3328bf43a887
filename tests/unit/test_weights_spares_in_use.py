"""Files that are written over: whoever still has one of them, open, mapped or under another name, keeps what he has."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.rundir import RunDir
from stages.weights import spares
from stages.weights.collect import collect
from stages.weights.errors import DigestMismatchError
from stages.weights.mapped_files import MappedFiles
from stages.weights.publish import Publisher
from stages.weights.reader import read_verified
from tests.faulty_files import FaultyFiles, Torn
from tests.weights_kit import make_context, small_tensors
from tests.weights_spares_kit import (
    FILE,
    assert_published,
    context,
    on_any_filesystem,
    publish,
    publisher,
    run,
    spare_names,
    with_spare,
)

__all__ = ["context", "on_any_filesystem", "publisher", "run"]


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

    assert spares.take(run, target, MappedFiles(torch.device("cpu"))) == 0
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


def test_bytes_that_were_not_stored_are_found_out_over_an_old_version_too(
    run: RunDir, publisher: Publisher, on_any_filesystem: bool
) -> None:
    """The place holds bytes of a whole older version, the same number of them."""
    if on_any_filesystem:
        pytest.skip("what is copied into memory is not stored later")
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
