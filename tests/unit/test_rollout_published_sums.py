"""An engine that is given the trainer's sums makes none of its own for them, and refuses what does not have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conf.sections import WeightsConfig
from stages.rollout import source_sums
from stages.rollout.errors import ProofFailedError
from stages.rollout.orders import Order
from stages.rollout.reload import Reloads
from stages.rollout.worker import WeightWorker
from stages.rundir import RunDir
from stages.weights import reader
from stages.weights.manifest import Manifest
from tests.engine_kit import (
    DOWN,
    EMBED,
    NORM,
    QKV,
    EngineModel,
    Runner,
    checkpoint,
    engine,
    loaded,
    part_sums_on_the_host,
    publish_version,
    run,
    stage,
    start_folder,
)
from tests.rollout_guard_kit import FakeEngine, in_loop, settings_of
from tests.weights_kit import publish_full
from traces.recorder import Recorder

__all__ = ["run"]


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return start_folder(tmp_path / "start", checkpoint(0))


def _nothing(*_: Any) -> int:
    raise AssertionError("summed up on the host")


def test_nothing_is_summed_up_on_the_host_for_what_the_trainer_summed_up(
    run: RunDir, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_sums_on_the_host(monkeypatch)
    manifest = publish_version(run, 1)
    model = loaded(EngineModel(), checkpoint(0))
    weights = engine(run, model, start)
    for name in ("host_sum", "stretch_sum"):
        monkeypatch.setattr(source_sums, name, _nothing)

    for read_here in (True, False):
        staged = stage(weights, run, manifest)
        report = weights.swap(staged)
        weights.staging.release()

        assert (report["fault"], report["read_here"]) == ("", read_here)
        assert report["published_sums"] == report["copies"] == len(manifest.tensors)
        assert torch.equal(model.norm, checkpoint(1)[NORM])


@pytest.mark.parametrize("size", [1, 2])
def test_sums_are_the_same_whether_the_trainer_or_the_reader_makes_them(
    run: RunDir, start: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [engine(run, loaded(EngineModel(rank, size), checkpoint(0)), start) for rank in range(size)]
    manifest = publish_version(run, 1)
    plain = [stage(weights, run, manifest) for weights in engines]
    for weights in engines:
        weights.staging.release()
    part_sums_on_the_host(monkeypatch)
    manifest = publish_version(run, 2, checkpoint(1))
    summed = [stage(weights, run, manifest) for weights in engines]

    assert [staged.sums for staged in summed] == [staged.sums for staged in plain]
    assert {staged.published_sums for staged in plain} == {0}
    assert {staged.published_sums for staged in summed} == {6 if size == 1 else 1}


def test_a_reader_that_sums_nothing_up_hashes_in_smaller_chunks(
    run: RunDir, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    honest = reader._read_piece

    def read_piece(fd: int, piece: Any, tensor: torch.Tensor, arrived: Any = None, *more: int) -> None:
        asked.append(arrived is not None)
        honest(fd, piece, tensor, arrived, *more)

    monkeypatch.setattr(reader, "_read_piece", read_piece)
    weights = engine(run, loaded(EngineModel(), checkpoint(0)), start)
    stage(weights, run, publish_version(run, 1))
    weights.staging.release()
    part_sums_on_the_host(monkeypatch)
    stage(weights, run, publish_version(run, 2))

    assert asked == [True] * 6 + [False] * 6


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("tensor", [EMBED, QKV[1], DOWN, NORM])
def test_staged_bytes_that_change_after_they_were_verified_are_refused(
    run: RunDir, start: Path, published: bool, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if published:
        part_sums_on_the_host(monkeypatch)
    weights = engine(run, loaded(EngineModel(), checkpoint(0)), start)
    staged = stage(weights, run, publish_version(run, 1))

    weights.staging.tensors[tensor].view(-1).view(torch.uint8)[5] ^= 1

    report = weights.swap(staged)
    assert report["tensor"] == tensor
    assert f"does not hold {tensor} of version 1" in report["fault"]


class WorkerEngine(FakeEngine):
    """Its weights are in a worker extension on a small model; its answers are those of the trainer."""

    def __init__(self, worker: WeightWorker) -> None:
        super().__init__()
        self._worker = worker

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        self.log.append(method)
        return [getattr(self._worker, method)(*arguments)]


def reloads_of(run: RunDir, start: Path) -> Reloads:
    worker = WeightWorker()
    worker.model_runner = Runner(loaded(EngineModel(), checkpoint(0)))
    worker.device = torch.device("cpu")
    assert worker.libra_start(run.run_id, str(start), "float32")["why_reload"] == ""
    recorder = Recorder(run.traces, "rollout", 0, 1, "rollout_000.server", enabled=False)
    return Reloads(settings_of(run, start_folder=str(start)), WorkerEngine(worker), recorder)


def order_of(run: RunDir, manifest: Manifest) -> Order:
    path = f"weights/v{manifest.version:06d}"
    return Order(run.run_id, run.attempt, manifest.version, path, manifest.digest, "inplace", 5.0)


def publish_for_server(run: RunDir, start: Path) -> Manifest:
    return publish_full(run, 1, checkpoint(1), WeightsConfig(dtype="float32"), source=start)


def test_a_server_proves_a_version_with_the_trainers_sums(
    run: RunDir, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_sums_on_the_host(monkeypatch)
    order = order_of(run, publish_for_server(run, start))
    reloads = reloads_of(run, start)

    async def body() -> None:
        await reloads.prepare(order)
        answer = await reloads.commit(order)
        assert [report["published_sums"] for report in answer["workers"]] == [6]
        assert reloads.gate.shut_because == ""

    in_loop(body)


@pytest.mark.parametrize("tensor", [EMBED, QKV[2], DOWN, NORM])
def test_right_bytes_with_a_wrong_sum_are_a_failed_proof_of_that_tensor(
    run: RunDir, start: Path, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes fit the digests: they were damaged between the sum on the trainer's device and the digest on its host."""
    part_sums_on_the_host(monkeypatch, wrong=tensor)
    order = order_of(run, publish_for_server(run, start))
    reloads = reloads_of(run, start)

    async def body() -> None:
        await reloads.prepare(order)
        with pytest.raises(ProofFailedError, match=f"does not hold {tensor} of version 1") as caught:
            await reloads.commit(order)
        assert caught.value.tensor == tensor
        assert f"does not hold {tensor} of version 1" in reloads.gate.shut_because

    in_loop(body)
