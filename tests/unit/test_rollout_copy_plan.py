"""The recorded way from a checkpoint into an engine's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from stages.rollout.copy_plan import Copy, PlanError, View, record
from tests.engine_kit import DOWN, EMBED, QKV, EngineModel, checkpoint, loaded


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2])
def test_the_copies_of_every_rank_do_what_its_loader_does(size: int) -> None:
    for rank in range(size):
        by_loader = loaded(EngineModel(rank, size), checkpoint(1))
        by_copies = loaded(EngineModel(rank, size), checkpoint(2))
        copies = record(by_copies.load_weights, checkpoint(0), parameters_of(by_copies))

        for copy in copies:
            target = copy.target.of(parameters_of(by_copies)[copy.parameter])
            target.copy_(copy.source.of(checkpoint(1)[copy.name]))

        for name, parameter in parameters_of(by_loader).items():
            assert torch.equal(parameters_of(by_copies)[name], parameter)


def test_recording_changes_nothing_in_the_engine() -> None:
    model = loaded(EngineModel(), checkpoint(1))
    before = {name: parameter.clone() for name, parameter in parameters_of(model).items()}

    record(model.load_weights, checkpoint(2), parameters_of(model))

    assert all(torch.equal(parameters_of(model)[name], tensor) for name, tensor in before.items())


def test_a_fused_tensor_is_recorded_as_rows_and_a_rank_s_share_as_columns() -> None:
    model = EngineModel(rank=1, size=2)

    copies = {copy.name: copy for copy in record(model.load_weights, checkpoint(0), parameters_of(model))}

    assert copies[QKV[1]] == Copy(QKV[1], View((2, 8), (8, 1), 16), "qkv", View((2, 8), (8, 1), 32))
    assert copies[DOWN] == Copy(DOWN, View((8, 6), (12, 1), 6), "down", View((8, 6), (6, 1), 0))


class Forgets(EngineModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name != QKV[1]:
            super().load(name, tensor)


class Repeats(EngineModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        super().load(name, tensor)


class Computes(EngineModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor + 1 if name == EMBED else tensor)


class Changes(EngineModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        if name == EMBED:
            self.embed.data.mul_(2)


class Spreads(EngineModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == EMBED:
            self.embed.data.copy_(tensor[0])
        else:
            super().load(name, tensor)


class Scatters(EngineModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == DOWN:
            self.down.data[:, :6].copy_(tensor[:, :6])
            self.down.data[:, 6:].copy_(tensor[:, 6:])
        else:
            super().load(name, tensor)


class Refuses(EngineModel):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        assert name != EMBED, "already processed"
        super().load(name, tensor)


@pytest.mark.parametrize(
    "kind, why",
    [
        (Forgets, "qkv: element 64 is never loaded"),
        (Repeats, "is loaded twice"),
        (Computes, "computed, not copied"),
        (Changes, "is changed by aten.mul_"),
        (Spreads, "is spread over"),
        (Scatters, "do not lie in a row"),
        (Refuses, "already processed"),
    ],
)
def test_a_loader_that_does_more_than_copying_is_found_out(kind: Callable[[], EngineModel], why: str) -> None:
    model = kind()

    with pytest.raises(PlanError, match=why):
        record(model.load_weights, checkpoint(0), parameters_of(model))


def test_an_engine_in_another_number_format_is_not_copied_into() -> None:
    model = EngineModel(dtype=torch.bfloat16)

    with pytest.raises(PlanError, match=r"is torch\.bfloat16, .* is published as torch\.float32"):
        record(model.load_weights, checkpoint(0), parameters_of(model))


def test_an_error_of_another_kind_is_not_taken_for_a_reason() -> None:
    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        record(load, checkpoint(0), {})
