"""Publishing over torch.distributed, as the trainer does it: two processes, gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from conf.sections import WeightsConfig
from stages.rundir import RunDir
from stages.trainer.gather import gather_bytes
from stages.weights.errors import PublishError
from stages.weights.publish import publish
from stages.weights.reader import load_manifest, verify
from stages.weights.tensors import LocalTensor
from tests.weights_kit import PROBE, make_source

RANKS = 2


class GlooRanks:
    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def gather(self, data: bytes) -> list[bytes]:
        return gather_bytes(data, None)


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(32, 16),
        "up": torch.randn(48, 16),
        "down": torch.randn(16, 48),
        "norm": torch.randn(16),
    }


def owned(rank: int) -> list[LocalTensor]:
    """Tensor-parallel slices: rows of `embed` and `up`, columns of `down`, `norm` from rank 0."""
    full = model()
    slices = []
    for name, dim in (("embed", 0), ("up", 0), ("down", 1)):
        part = full[name].chunk(RANKS, dim)[rank]
        slices.append(LocalTensor.along(name, tuple(full[name].shape), dim, rank * part.shape[dim], part))
    return [*slices, *([LocalTensor.whole("norm", full["norm"])] if rank == 0 else [])]


def exchanged(rank: int) -> Iterator[LocalTensor]:
    """Each tensor is made by both ranks together; rank 1 offers one that cannot be published, and has a second to help with."""
    for local in owned(rank)[:2]:
        dist.all_reduce(torch.zeros(1))
        yield replace(local, tensor=local.tensor.int()) if rank == 1 else local


def trainer_rank(rank: int, folder: Path) -> None:
    """Versions 1, 3, 5 are sound; of 2, rank 1 leaves a slice out; at 4, rank 1 fails while the ranks exchange rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    for version in (1, 2, 3, 4, 5):
        try:
            publish(
                RunDir.open(folder / "run", writer="trainer"),
                version=version,
                step=version,
                tensors=exchanged(rank) if version == 4 else owned(rank)[1 if (version, rank) == (2, 1) else 0 :],
                probe=PROBE if rank == 0 else None,
                source_folder=folder / "source",
                options=WeightsConfig(dtype="bfloat16"),
                ranks=GlooRanks(),
            )
        except PublishError as problem:
            (folder / f"error{rank}.{version}").write_text(f"version {version}: {problem}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    make_source(folder / "source")
    RunDir.create(folder / "run")
    mp.spawn(trainer_rank, (folder,), nprocs=RANKS)  # type: ignore[attr-defined]
    return folder


@pytest.mark.parametrize("version", [1, 3, 5])
def test_tensor_parallel_ranks_write_one_ordinary_file(folder: Path, version: int) -> None:
    run = RunDir.open(folder / "run", writer="test")

    verify(run, load_manifest(run, version))
    published = {name: tensor.to(torch.bfloat16) for name, tensor in model().items()}
    expected = safetensors.torch.save(published, metadata={"format": "pt"})
    assert (run.weights_version(version) / "model.safetensors").read_bytes() == expected


def test_ranks_that_leave_out_a_slice_all_fail_and_none_hangs(folder: Path) -> None:
    errors = [(folder / f"error{rank}.2").read_text() for rank in range(RANKS)]

    assert errors[0] == errors[1]
    assert errors[0].startswith("version 2: tensor embed of shape [32, 16]: 256 of 512 elements have no owner")
    assert RunDir.open(folder / "run", writer="test").published_versions() == [1, 3, 5]


def test_a_rank_that_fails_while_ranks_make_tensors_together_leaves_none_waiting(folder: Path) -> None:
    errors = [(folder / f"error{rank}.4").read_text() for rank in range(RANKS)]

    assert errors[0] == errors[1]
    assert errors[0].startswith("version 4: tensor embed has dtype torch.int32")
