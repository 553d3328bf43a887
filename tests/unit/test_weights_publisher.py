"""The publisher that a trainer keeps: what is published is what the parameters were when `begin` returned."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stages.rundir import RunDir
from stages.weights.errors import NoSpaceError, PublishError
from stages.weights.manifest import Manifest
from stages.weights.publication import Publication
from stages.weights.publish import Publisher
from stages.weights.ranks import RankGroup
from stages.weights.reader import load_manifest, read_verified, verify
from stages.weights.snapshot import Piece
from stages.weights.tensors import LocalTensor
from tests.weights_kit import PROBE, make_publisher, run_ranks, small_tensors


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def publisher(run: RunDir) -> Iterator[Publisher]:
    with make_publisher(run) as made:
        yield made


def whole(tensors: dict[str, torch.Tensor]) -> list[LocalTensor]:
    return [LocalTensor.whole(name, tensor) for name, tensor in tensors.items()]


def assert_published(run: RunDir, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    read = read_verified(run, load_manifest(run, manifest.version, manifest.digest))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name].to(read[name].dtype)) for name in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_may_change_once_begin_has_returned(run: RunDir, dtype: str) -> None:
    parameters = small_tensors()
    before = {name: tensor.clone() for name, tensor in parameters.items()}

    with make_publisher(run, dtype=dtype) as publisher:
        publication = publisher.begin(1, 1, whole(parameters), PROBE)
        for tensor in parameters.values():
            tensor.fill_(torch.nan)
        manifest = publication.finish()

    assert_published(run, manifest, before)


def test_the_next_version_is_copied_to_the_same_memory(run: RunDir, publisher: Publisher) -> None:
    versions = [small_tensors(seed) for seed in (1, 2)]

    places, allocated = [], []
    for number, tensors in enumerate(versions, start=1):
        manifest = publisher.begin(number, number, whole(tensors), PROBE).finish()
        assert_published(run, manifest, tensors)
        allocated.append(publisher.copier.buffers.allocated_bytes)
        publisher.copier.buffers.clear()
        places.append(publisher.copier.buffers.take(8).data_ptr())

    assert allocated[0] == allocated[1]
    assert places[0] == places[1]


def test_a_begin_waits_until_the_version_before_is_published(run: RunDir, publisher: Publisher) -> None:
    first = small_tensors(1)
    publisher.begin(1, 1, whole(first), PROBE)

    second = publisher.begin(2, 2, whole(small_tensors(2)), PROBE)

    assert_published(run, load_manifest(run, 1), first)
    assert second.finish().version == 2


def test_finish_tells_the_same_in_every_thread(publisher: Publisher) -> None:
    publication = publisher.begin(1, 1, whole(small_tensors()), PROBE)
    told: list[Manifest] = []
    threads = [threading.Thread(target=lambda: told.append(publication.finish())) for _ in range(3)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert told == [publication.finish()] * 3


def test_after_a_failure_the_next_version_is_sound(
    run: RunDir, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        failed = publisher.begin(1, 1, whole(small_tensors(1)), PROBE)
        for _ in range(2):
            with pytest.raises(NoSpaceError):
                failed.finish()
    assert os.listdir(run.weights) == []

    later = small_tensors(2)
    assert_published(run, publisher.begin(2, 2, whole(later), PROBE).finish(), later)


def test_a_publication_that_nobody_finishes_leaves_nothing(run: RunDir) -> None:
    with make_publisher(run) as publisher:
        publisher.begin(1, 1, whole(small_tensors()), PROBE)

    assert os.listdir(run.weights) == []


def test_the_report_states_time_and_memory(publisher: Publisher) -> None:
    tensors = {f"t{i}": torch.randn(1000, 70) for i in range(3)}

    publication = publisher.begin(1, 1, whole(tensors), PROBE)
    publication.finish()

    report = publication.report
    assert 0 < report.snapshot_s < report.total_s
    assert 0 < report.write_s < report.total_s
    assert 3 * 280_000 <= report.peak_extra_host_bytes == publisher.copier.buffers.allocated_bytes


def test_lent_tensors_are_not_copied(run: RunDir, publisher: Publisher) -> None:
    tensors = small_tensors()

    publication = publisher.begin(1, 1, whole(tensors), PROBE, lend=True)

    assert_published(run, publication.finish(), tensors)
    assert publication.report.peak_extra_host_bytes == 0


def test_a_copy_that_fails_on_one_rank_fails_the_publication_on_all(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Piece.converted

    def failing(piece: Piece) -> torch.Tensor:
        if piece.name == "rank 1":
            raise RuntimeError("device lost")
        return real(piece)

    monkeypatch.setattr(Piece, "converted", failing)

    def body(group: RankGroup) -> Manifest:
        with make_publisher(run, group) as publisher:
            owned = whole({f"rank {group.rank}": torch.ones(3)})
            return publisher.begin(1, 1, owned, PROBE, lend=True).finish()

    errors = [future.exception() for future in run_ranks(2, body)]

    assert [type(error) for error in errors] == [PublishError] * 2
    assert all("trainer rank 1 of 2: RuntimeError: device lost" in str(error) for error in errors)
    assert os.listdir(run.weights) == []


def test_a_large_tensor_is_copied_and_hashed_in_parts(
    run: RunDir, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.weights.snapshot.PIECE_BYTES", 100)
    tensors = {"large": torch.randn(7, 10), "small": torch.randn(5)}

    manifest = publisher.begin(1, 1, whole(tensors), PROBE).finish()

    assert [part.shape for part in manifest.tensors["large"].parts] == [(2, 10), (2, 10), (2, 10), (1, 10)]
    assert len(manifest.tensors["small"].parts) == 1
    assert_published(run, manifest, tensors)


def test_tensors_may_be_spread_over_pipeline_expert_and_tensor_parallel_ranks(run: RunDir) -> None:
    """Eight ranks: two pipeline stages with a layer each, in it experts and columns are divided by two."""
    full = {f"layers.{layer}.experts": torch.randn(4, 6, 10) for layer in range(2)} | {"norm": torch.randn(6)}

    def owned(rank: int) -> list[LocalTensor]:
        layer, expert, column = list(product(range(2), repeat=3))[rank]
        name = f"layers.{layer}.experts"
        start = (2 * expert, 0, 5 * column)
        box = full[name][start[0] : start[0] + 2, :, start[2] : start[2] + 5]
        rest = whole({"norm": full["norm"]}) if rank == 7 else []
        return [LocalTensor(name, (4, 6, 10), start, box), *rest]

    def body(group: RankGroup) -> Manifest:
        with make_publisher(run, group) as publisher:
            return publisher.begin(1, 1, owned(group.rank), PROBE).finish()

    manifests = [future.result() for future in run_ranks(8, body)]

    assert all(manifest == manifests[0] for manifest in manifests)
    assert_published(run, manifests[0], full)
    verify(run, manifests[0])


# ---- what is flushed ----------------------------------------------------------------------------------------------


@pytest.mark.exercises("weights.fsync")
@pytest.mark.parametrize(
    ("policy", "magic", "flushed"),
    [
        ("auto", 0xEF53, False),
        ("auto", 0x6969, True),  # nfs
        ("auto", 0x12345678, True),
        ("always", 0xEF53, True),
        ("never", 0x6969, False),
    ],
)
def test_a_version_is_flushed_where_another_host_may_read_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, policy: str, magic: int, flushed: bool
) -> None:
    monkeypatch.setattr("stages.weights.filesystems.filesystem_magic", lambda _: magic)
    synced: set[str] = set()
    fsync = os.fsync

    def noting(fd: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    with make_publisher(run, fsync=policy) as publisher:
        publisher.begin(1, 1, whole(small_tensors()), PROBE).finish()

    assert ({"model.safetensors", "manifest.json", "weights"} <= synced) == flushed
    assert bool(synced) == flushed


def test_every_rank_flushes_its_own_bytes(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", flushers := Flushers())
    tensors = small_tensors()

    def body(group: RankGroup) -> Manifest:
        owned = {name: tensor for number, (name, tensor) in enumerate(tensors.items()) if number % 2 == group.rank}
        with make_publisher(run, group, fsync="always", max_file_bytes=1) as publisher:
            return publisher.begin(1, 1, whole(owned), PROBE).finish()

    manifest = run_ranks(2, body)[0].result()

    assert flushers.names >= manifest.files.keys()


class Flushers:
    """Stands in for os.fsync."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __call__(self, fd: int) -> None:
        self.names.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name)


@pytest.mark.parametrize(
    ("is_cuda", "in_file", "io_threads", "threads"),
    [(True, True, 16, 14), (True, True, 4, 4), (True, False, 16, 16), (False, True, 16, 16)],
)
def test_where_a_gpu_copies_into_the_files_two_processors_are_left_to_others(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, is_cuda: bool, in_file: bool, io_threads: int, threads: int
) -> None:
    with make_publisher(run, io_threads=io_threads) as publisher:
        monkeypatch.setattr(type(publisher.copier), "is_cuda", is_cuda)
        publication = Publication(publisher, 1, 1, PROBE)
        monkeypatch.setattr(
            publication, "_copies", [(SimpleNamespace(num_bytes=1 << 30), SimpleNamespace(in_file=in_file))]
        )

        assert publication._threads() == threads
