"""Versions into a small engine that fuses, pads and splits as vLLM's models do; what arrived is compared."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.rollout.engine_weights import EngineWeights
from stages.rundir import RunDir
from stages.weights import reader
from stages.weights.errors import DigestMismatchError, SignatureMismatchError
from stages.weights.manifest import Manifest
from tests.engine_kit import (
    DOWN,
    EMBED,
    NORM,
    QKV,
    EngineModel,
    checkpoint,
    engine,
    loaded,
    publish_version,
    run,
    stage,
)
from tests.engine_kit import start_folder as made_folder

__all__ = ["run"]


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return made_folder(tmp_path / "start", checkpoint(0))


def holds(model: EngineModel, tensors: dict[str, torch.Tensor]) -> bool:
    wanted = loaded(EngineModel(model.rank, model.size, model.embed.dtype), tensors)
    return all(torch.equal(one, other) for one, other in zip(model.parameters(), wanted.parameters(), strict=True))


@pytest.mark.parametrize("size", [1, 2])
def test_a_staged_version_goes_into_every_rank(run: RunDir, start: Path, size: int) -> None:
    manifest = publish_version(run, 1)
    for rank in range(size):
        model = loaded(EngineModel(rank, size), checkpoint(0))
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        weights = engine(run, model, start)
        assert weights.why_reload == ""

        report = weights.swap(stage(weights, run, manifest))

        assert (report["method"], report["fault"], report["read_here"]) == ("copies", "", rank == 0)
        assert holds(model, checkpoint(1))
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_versions_follow_each_other_in_the_same_memory(run: RunDir, start: Path) -> None:
    model = loaded(EngineModel(), checkpoint(0))
    weights = engine(run, model, start)

    for version in (1, 2, 3):
        staged = stage(weights, run, publish_version(run, version))
        assert weights.swap(staged)["fault"] == ""
        weights.staging.release()
        assert holds(model, checkpoint(version))


def test_bytes_that_are_read_twice_before_they_are_held_are_summed_up_once(
    run: RunDir, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may replace them in the moment between reading and holding."""
    weights = engine(run, loaded(EngineModel(), checkpoint(0)), start)
    honest = weights.staging.hold

    def hold(content: str, fill: Callable[[], None], **how: Any) -> bool:
        fill()
        return honest(content, fill, **how)

    monkeypatch.setattr(weights.staging, "hold", hold)

    assert weights.swap(stage(weights, run, publish_version(run, 1)))["fault"] == ""


@pytest.mark.parametrize("size", [1, 2])
def test_sums_are_the_same_whoever_read_the_bytes_and_in_whatever_pieces(
    run: RunDir, start: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publish_version(run, 1)
    for rank in range(size):
        sums = []
        for chunk_bytes in (4 << 20, 24, 20, 6):  # 6: ends within a word
            weights = engine(run, loaded(EngineModel(rank, size), checkpoint(0)), start)
            monkeypatch.setattr(reader, "_CHUNK_BYTES", chunk_bytes)
            reading = stage(weights, run, manifest)
            weights.staging.release()
            sharing = stage(weights, run, manifest)
            assert (reading.read_here, sharing.read_here) == (True, False)
            assert reading.sums == sharing.sums
            assert weights.swap(reading)["fault"] == ""
            sums.append(reading.sums)
            weights.staging.release()
            forget_content(weights)
        assert sums == [sums[0]] * len(sums)


def forget_content(weights: EngineWeights) -> None:
    assert weights.staging._segment is not None
    os.ftruncate(weights.staging._segment._lock, 0)


def skip(weights: EngineWeights, fault: Callable[[int, torch.Tensor, torch.Tensor], None]) -> None:
    """Let `fault(index, target, what it held)` undo some of what is copied."""
    honest = weights._copy_into

    def copy_into(targets: list[torch.Tensor]) -> None:
        before = [target.clone() for target in targets]
        honest(targets)
        for index, target in enumerate(targets):
            fault(index, target, before[index])

    weights._copy_into = copy_into  # type: ignore[method-assign]


def _one_tensor(index: int, target: torch.Tensor, before: torch.Tensor) -> None:
    if index == 2:
        target.copy_(before)


def _one_slice(index: int, target: torch.Tensor, before: torch.Tensor) -> None:
    if index == 2:
        target[1:2].copy_(before[1:2])


def _everything(index: int, target: torch.Tensor, before: torch.Tensor) -> None:
    target.copy_(before)


@pytest.mark.parametrize("fault", [_one_tensor, _one_slice, _everything])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swap_that_leaves_something_old_is_found_by_its_tensor_however_small_the_step(
    run: RunDir, tmp_path: Path, fault: Any, dtype: torch.dtype
) -> None:
    before = checkpoint(0, dtype)
    after = {name: torch.nextafter(tensor, torch.full_like(tensor, 9.0)) for name, tensor in before.items()}
    model = loaded(EngineModel(dtype=dtype), before)
    folder = made_folder(tmp_path / "start", before)
    weights = engine(run, model, folder, str(dtype).removeprefix("torch."))
    skip(weights, fault)

    report = weights.swap(stage(weights, run, publish_version(run, 1, after)))

    assert "does not hold" in report["fault"]
    assert report["tensor"] in report["fault"]


def test_what_the_engine_was_started_from_can_be_compared_without_changing_it(run: RunDir, start: Path) -> None:
    model = loaded(EngineModel(), checkpoint(0))
    weights = engine(run, model, start)

    assert weights.check(stage(weights, run, publish_version(run, 1, checkpoint(0))))["fault"] == ""
    weights.staging.release()
    report = weights.check(stage(weights, run, publish_version(run, 2)))

    assert "does not hold model." in report["fault"]
    assert holds(model, checkpoint(0))


def test_an_engine_that_holds_something_else_than_its_files_is_reloaded_by_itself(run: RunDir, start: Path) -> None:
    model = loaded(EngineModel(), checkpoint(0))
    model.qkv.data[3, 3] += 1.0

    weights = engine(run, model, start)

    assert weights.why_reload.startswith(f"qkv does not hold {QKV[0]}")
    report = weights.swap(stage(weights, run, publish_version(run, 1)))
    assert report["method"] == "reload"
    assert all(torch.equal(weights._runner.reloaded[name], tensor) for name, tensor in checkpoint(1).items())


class Method:
    """A way of loading that this product does not know."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        raise AssertionError("not called")


def _with_method(model: EngineModel) -> None:
    model.quant_method = Method()  # type: ignore[assignment]


def _with_step(model: EngineModel) -> None:
    model.process_weights_after_loading = lambda: None  # type: ignore[assignment]


def _with_copy(model: EngineModel) -> None:
    model.absorbed = model.qkv.data.T.clone()


@pytest.mark.parametrize(
    "change, why", [(_with_method, "by Method"), (_with_step, "processes its weights"), (_with_copy, "'absorbed'")]
)
def test_a_layer_that_derives_something_from_its_weights_is_not_copied_into(
    run: RunDir, start: Path, change: Callable[[EngineModel], None], why: str
) -> None:
    model = loaded(EngineModel(), checkpoint(0))
    change(model)

    assert why in engine(run, model, start).why_reload


def test_damaged_files_leave_nothing_that_another_worker_would_take(run: RunDir, start: Path) -> None:
    manifest = publish_version(run, 1)
    entry = manifest.tensors[DOWN]
    path = run.weights_version(1) / entry.file
    data = bytearray(path.read_bytes())
    sound = bytes(data)
    data[entry.offset + 5] ^= 0x10
    path.write_bytes(data)
    first = engine(run, loaded(EngineModel(), checkpoint(0)), start)

    with pytest.raises(DigestMismatchError, match=DOWN):
        stage(first, run, manifest)

    path.write_bytes(sound)
    assert stage(first, run, manifest).read_here


def test_a_version_without_one_of_the_engine_s_tensors_is_refused(run: RunDir, start: Path) -> None:
    weights = engine(run, loaded(EngineModel(), checkpoint(0)), start)
    tensors = checkpoint(1)
    del tensors[NORM]

    with pytest.raises(SignatureMismatchError, match=NORM):
        stage(weights, run, publish_version(run, 1, tensors))


# ---- layers that multiply with a packed copy (vLLM's CPU backend) ----------------------------------------------------


class UnquantizedLinearMethod:
    """Packs as vLLM's CPU backend does: the weight itself is let go."""

    removes = True

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        layer.weight = torch.nn.Parameter(torch.full(shape, float("nan"), dtype=params_dtype), requires_grad=False)

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
        if self.removes:
            layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod):
    removes = False


class PackedLayer(torch.nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.input_size = self.input_size_per_partition = width
        self.output_size, self.output_partition_sizes = rows, [rows]
        self.params_dtype = torch.float32
        self.quant_method = UnquantizedLinearMethod()
        self.quant_method.create_weights(self, width, [rows], width, rows, torch.float32, None)

    def weight_loader(self) -> None:
        raise AssertionError("the stand-in's model loads by itself")


class PackedModel(torch.nn.Module):
    """down is packed and gone; the head shares the embedding's weight and multiplies with a packed copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Module()
        self.embed.weight = torch.nn.Parameter(torch.zeros(10, 8), requires_grad=False)
        self.head = torch.nn.Module()
        self.head.weight = self.embed.weight
        self.head.quant_method = UnquantizedEmbeddingMethod()  # type: ignore[assignment]
        self.down = PackedLayer(8, 12)

    def load_weights(self, weights: Any) -> set[str]:
        for name, tensor in weights:
            (self.embed if name == EMBED else self.down).get_parameter("weight").data.copy_(tensor)
        return set()


def packed_engine(run: RunDir, tmp_path: Path) -> tuple[Any, EngineWeights]:
    tensors = {name: checkpoint(0)[name] for name in (EMBED, DOWN)}
    model: Any = loaded(PackedModel(), tensors)
    for layer in (model.down, model.head):
        layer.quant_method.process_weights_after_loading(layer)
    return model, engine(run, model, made_folder(tmp_path / "packed", tensors))


def publish_packed(run: RunDir, version: int) -> Manifest:
    return publish_version(run, version, {name: checkpoint(version)[name] for name in (EMBED, DOWN)})


def test_packed_layers_multiply_with_the_new_version_afterwards(run: RunDir, tmp_path: Path) -> None:
    model, weights = packed_engine(run, tmp_path)
    assert (weights.why_reload, weights.description()["packed_layers"]) == ("", 2)

    report = weights.swap(stage(weights, run, publish_packed(run, 1)))

    assert report["fault"] == ""
    assert model.down.weight.numel() == 0
    assert torch.equal(model.down.cpu_linear(torch.eye(12), None, None).T, checkpoint(1)[DOWN])
    assert torch.equal(model.head.cpu_linear(torch.eye(8), None, None).T, checkpoint(1)[EMBED])


@pytest.mark.parametrize("layer, tensor", [("down", DOWN), ("head", "")])
def test_a_layer_that_keeps_its_old_packed_copy_is_found(run: RunDir, tmp_path: Path, layer: str, tensor: str) -> None:
    model, weights = packed_engine(run, tmp_path)
    chosen: Any = getattr(model, layer)
    chosen.quant_method.process_weights_after_loading = lambda _layer: None

    report = weights.swap(stage(weights, run, publish_packed(run, 1)))

    assert report["fault"].startswith(f"{layer} in the engine multiplies with other weights than version 1")
    assert report["tensor"] == tensor


def test_packed_copies_of_a_started_engine_are_compared_too(run: RunDir, tmp_path: Path) -> None:
    _, weights = packed_engine(run, tmp_path)

    other = checkpoint(0) | {DOWN: checkpoint(1)[DOWN]}
    report = weights.check(stage(weights, run, publish_version(run, 1, {name: other[name] for name in (EMBED, DOWN)})))

    assert (report["tensor"], report["fault"].split()[0]) == (DOWN, "down")


def test_a_packed_copy_of_something_else_than_the_files_is_found_at_start(run: RunDir, tmp_path: Path) -> None:
    tensors = {name: checkpoint(0)[name] for name in (EMBED, DOWN)}
    model: Any = loaded(PackedModel(), tensors)
    model.down.weight.data[0, 0] += 1
    for layer in (model.down, model.head):
        layer.quant_method.process_weights_after_loading(layer)

    weights = engine(run, model, made_folder(tmp_path / "packed", tensors))

    assert weights.why_reload == "down does not multiply with the weight that was loaded"
