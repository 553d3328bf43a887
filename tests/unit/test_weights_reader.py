"""Reading a version: every byte is read once and believed only when its digest matches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.sections import WeightsConfig
from stages.files import WaitTimeoutError
from stages.rundir import OutsideRunError, RunDir
from stages.weights import reader
from stages.weights.errors import DigestMismatchError, SizeMismatchError
from stages.weights.manifest import Manifest
from stages.weights.publish import publish
from stages.weights.ranks import RankGroup
from stages.weights.reader import faults, load_manifest, read_verified, verify, wait_for_manifest
from stages.weights.tensors import LocalTensor, bytes_of
from tests.weights_kit import PROBE, make_source, publish_full, run_ranks, small_tensors


def publish_sliced(run: RunDir) -> Manifest:
    """Two ranks; one tensor in rows, one in columns, one whole; several files."""
    full = small_tensors(1)
    source = make_source(run.root.parent / "source")

    def slices(rank: int) -> list[LocalTensor]:
        up, down = full["model.layer.up"], full["model.layer.down"]
        rest = [LocalTensor.whole(name, full[name]) for name in ("model.embed", "model.layer.norm", "model.scale")]
        return [
            LocalTensor.along("model.layer.up", (8, 4), 0, 4 * rank, up[4 * rank : 4 * rank + 4]),
            LocalTensor.along("model.layer.down", (4, 8), 1, 4 * rank, down[:, 4 * rank : 4 * rank + 4]),
            *(rest if rank == 0 else []),
        ]

    def body(group: RankGroup) -> Manifest:
        return publish(
            run,
            version=1,
            step=1,
            tensors=slices(group.rank),
            probe=PROBE,
            source_folder=source,
            options=WeightsConfig(dtype="float32", max_file_bytes=150),
            ranks=group,
        )

    return run_ranks(2, body)[0].result()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Manifest]:
    run = RunDir.create(tmp_path_factory.mktemp("reader") / "run")
    return run, publish_sliced(run)


@contextmanager
def flipped(path: Path, place: int, flip: int) -> Iterator[None]:
    sound = path.read_bytes()
    path.write_bytes(sound[:place] + bytes([sound[place] ^ flip]) + sound[place + 1 :])
    try:
        yield
    finally:
        path.write_bytes(sound)


def owner_of(manifest: Manifest, file: str, place: int) -> str:
    """The tensor that byte `place` of `file` belongs to; empty for headers and small files."""
    for name, entry in manifest.tensors.items():
        if entry.file == file and entry.offset <= place < entry.offset + entry.bytes:
            return name
    return ""


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_flipped_byte_anywhere_is_caught_and_its_tensor_named(
    published: tuple[RunDir, Manifest], data: st.DataObject
) -> None:
    run, manifest = published
    file = data.draw(st.sampled_from(sorted(manifest.files)))
    place = data.draw(st.integers(0, manifest.files[file].bytes - 1))
    with flipped(run.weights_version(1) / file, place, data.draw(st.integers(1, 255))):
        with pytest.raises(DigestMismatchError) as caught:
            read_verified(run, manifest)
        with pytest.raises(DigestMismatchError):
            verify(run, manifest)
        found = faults(run, manifest)

    assert (caught.value.file, caught.value.tensor) == (file, owner_of(manifest, file, place))
    assert file in str(caught.value)
    assert [str(fault) for fault in found] == [str(caught.value)]


def test_slices_of_several_ranks_are_parts_of_one_tensor(published: tuple[RunDir, Manifest]) -> None:
    run, manifest = published

    assert [part.shape for part in manifest.tensors["model.layer.down"].parts] == [(4, 4), (4, 4)]
    read = read_verified(run, manifest)
    assert all(torch.equal(read[name], tensor) for name, tensor in small_tensors(1).items())


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_is_noticed_before_anything_is_read(tmp_path: Path, change: int) -> None:
    run = RunDir.create(tmp_path / "run")
    manifest = publish_full(run, 1)
    path = run.weights_version(1) / "model.safetensors"
    os.truncate(path, path.stat().st_size + change)

    with pytest.raises(SizeMismatchError, match=r"model\.safetensors: [\d,]+ bytes, manifest says"):
        read_verified(run, manifest)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    manifest = publish_full(run, 1)
    (run.weights_version(1) / "tokenizer.json").unlink()

    with pytest.raises(SizeMismatchError, match=r"tokenizer\.json: missing"):
        verify(run, manifest)


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_something_that_is_no_file_is_refused_without_hanging(tmp_path: Path, kind: str) -> None:
    run = RunDir.create(tmp_path / "run")
    manifest = publish_full(run, 1)
    path = run.weights_version(1) / "tokenizer.json"
    path.unlink()
    path.mkdir() if kind == "directory" else os.mkfifo(path)

    with pytest.raises(SizeMismatchError, match=r"tokenizer\.json"):
        verify(run, manifest)


def test_a_link_out_of_the_run_is_not_followed(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    manifest = publish_full(run, 1)
    path = run.weights_version(1) / "model.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OutsideRunError):
        verify(run, manifest)


def test_every_fault_is_listed_for_people(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    manifest = publish_sliced(run)
    folder = run.weights_version(1)
    (folder / "tokenizer.json").unlink()
    embed, norm = manifest.tensors["model.embed"], manifest.tensors["model.layer.norm"]

    with flipped(folder / embed.file, embed.offset, 1), flipped(folder / norm.file, norm.offset, 1):
        found = [str(fault) for fault in faults(run, manifest)]

    assert len(found) == 3
    assert any("tokenizer.json" in fault for fault in found)
    assert any("model.embed" in fault for fault in found)
    assert any("model.layer.norm" in fault for fault in found)


def test_only_the_named_tensors_are_read(published: tuple[RunDir, Manifest]) -> None:
    run, manifest = published
    wanted, other = manifest.tensors["model.embed"], manifest.tensors["model.layer.up"]
    assert wanted.file != other.file

    with flipped(run.weights_version(1) / other.file, other.offset, 1):
        read = read_verified(run, manifest, ["model.embed"])

    assert list(read) == ["model.embed"]


def test_bytes_are_reported_once_each_when_they_are_in_memory(
    published: tuple[RunDir, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, manifest = published
    monkeypatch.setattr(reader, "_CHUNK_BYTES", 12)
    into = {name: torch.zeros_like(tensor) for name, tensor in small_tensors(1).items()}
    found = {name: bytearray(entry.bytes) for name, entry in manifest.tensors.items()}
    reported = dict.fromkeys(manifest.tensors, 0)

    def arrived(name: str, first: int, length: int) -> None:
        found[name][first : first + length] = bytes_of(into[name])[first : first + length].tobytes()
        reported[name] += length

    read_verified(run, manifest, threads=1, into=into, arrived=arrived)

    assert reported == {name: entry.bytes for name, entry in manifest.tensors.items()}
    assert found == {name: bytearray(bytes_of(tensor).tobytes()) for name, tensor in small_tensors(1).items()}


def test_every_byte_is_read_once(published: tuple[RunDir, Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    run, manifest = published
    got: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        got.append(preadv(fd, buffers, offset))
        return got[-1]

    monkeypatch.setattr(os, "preadv", counted)
    read_verified(run, manifest)

    assert sum(got) == manifest.total_bytes


def lengths_of_reads(run: RunDir, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, **how: Any) -> list[int]:
    """Of all reads of tensors, in order; the beginnings of files are left out."""
    got: list[int] = []
    honest = reader.read_into

    def read_into(fd: int, view: memoryview, offset: int, file: str, wanted_bytes: int) -> None:
        if offset:
            got.append(len(view))
        honest(fd, view, offset, file, wanted_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(reader, "read_into", read_into)
        read_verified(run, manifest, threads=1, **how)
    return got


def test_the_largest_part_is_read_first_and_each_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread must not be left with a large one at the end; and each call may have to wait for the interpreter."""
    run = RunDir.create(tmp_path / "run")
    tensors = {f"t{rows}": torch.randn(rows, 8) for rows in (2, 9, 5, 7)}
    manifest = publish_full(run, 1, tensors)
    monkeypatch.setattr(reader, "_CHUNK_BYTES", 100)

    alone = lengths_of_reads(run, manifest, monkeypatch)
    told = lengths_of_reads(run, manifest, monkeypatch, arrived=lambda *_: None)

    assert alone == [9 * 32, 7 * 32, 5 * 32, 2 * 32]
    assert told == [96, 96, 96, 96, 96, 32, 96, 64, 64]  # whole rows


def test_a_folder_that_shows_up_late_is_waited_for(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    manifest = publish_full(run, 1)
    hidden = run.weights / ".not yet visible here"
    run.weights_version(1).rename(hidden)

    def appear() -> None:
        if hidden.exists():
            hidden.rename(run.weights_version(1))

    assert wait_for_manifest(run, 1, manifest.digest, deadline_s=10, check=appear) == manifest


def test_a_folder_that_never_shows_up_is_a_named_error(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")

    with pytest.raises(WaitTimeoutError, match=r"v000001 from the trainer"):
        wait_for_manifest(run, 1, None, deadline_s=0.01)


def test_a_manifest_of_another_run_is_not_read(tmp_path: Path) -> None:
    theirs, ours = RunDir.create(tmp_path / "theirs"), RunDir.create(tmp_path / "ours")
    publish_full(theirs, 1)
    theirs.weights_version(1).rename(ours.weights_version(1))

    with pytest.raises(WaitTimeoutError):
        wait_for_manifest(ours, 1, None, deadline_s=0.01)
    with pytest.raises(RuntimeError, match="not published"):
        load_manifest(ours, 1)
