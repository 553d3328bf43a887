"""A model folder whose tensors are not those of its config.json is refused by name (reading itself: tests/contract)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from stages.trainer.architecture import Architecture, ModelFolderError
from stages.trainer.hf_weights import WeightsMismatchError, load_weights, owned_pieces, tensor_files
from stages.trainer.mapping import hf_tensors, pieces

MODEL = Architecture("Qwen2ForCausalLM", 1, 4, 6, 4, 2, 2, 10, 8, 1e-6, 1e4, None, tied_embeddings=True)


def grid(tp_rank: int = 0, tp: int = 1, dp_rank: int = 0, dp: int = 1) -> Any:
    return cast(Any, SimpleNamespace(tp_rank=tp_rank, tp=tp, dp_rank=dp_rank, dp=dp))


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in hf_tensors(MODEL).items()}


def load_from(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    save_file(stored, folder / "model.safetensors")
    megatron: dict[str, int] = {}
    for piece in pieces(MODEL, 0, 1):
        megatron[piece.parameter] = max(megatron.get(piece.parameter, 0), piece.offset + piece.rows)
    widths = {piece.parameter: piece.full_shape[1:] for piece in pieces(MODEL, 0, 1)}
    counts = {piece.parameter: piece.groups for piece in pieces(MODEL, 0, 1)}
    named = {
        name: torch.nn.Parameter(torch.empty(counts[name] * rows, *widths[name])) for name, rows in megatron.items()
    }
    load_weights(cast(Any, SimpleNamespace(named_parameters=lambda: named.items())), folder, MODEL, grid())


def test_a_complete_folder_is_read(tmp_path: Path) -> None:
    load_from(tmp_path, tensors())


@pytest.mark.parametrize("extra", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_tensors_that_follow_from_the_others_may_be_stored_too(tmp_path: Path, extra: str) -> None:
    load_from(tmp_path, {**tensors(), extra: torch.ones(2)})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    stored = tensors()
    del stored["model.layers.0.self_attn.k_proj.bias"]

    with pytest.raises(WeightsMismatchError, match=r"lacks 1 tensors .*k_proj.bias"):
        load_from(tmp_path, stored)


def test_a_tensor_that_the_architecture_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatchError, match=r"does not use, first model.layers.0.self_attn.o_proj.bias"):
        load_from(tmp_path, {**tensors(), "model.layers.0.self_attn.o_proj.bias": torch.ones(4)})


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatchError, match=r"model.norm.weight has shape \[5\], config.json says \[4\]"):
        load_from(tmp_path, {**tensors(), "model.norm.weight": torch.ones(5)})


def test_a_folder_without_weights_says_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="holds neither"):
        tensor_files(tmp_path)


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weights": {}}))
    with pytest.raises(ModelFolderError, match="not a safetensors index"):
        tensor_files(tmp_path)


def test_a_damaged_weight_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(ModelFolderError, match="not a safetensors file"):
        tensor_files(tmp_path)


@pytest.mark.parametrize("tp, dp", [(1, 3), (2, 2)])
def test_replicas_divide_what_they_publish_about_evenly(tp: int, dp: int) -> None:
    model = Architecture("LlamaForCausalLM", 8, 64, 128, 4, 2, 16, 100, 8, 1e-6, 1e4, None, tied_embeddings=False)

    shares = [
        sum(piece.elements for piece in owned_pieces(model, grid(tp_rank, tp, dp_rank, dp)))
        for tp_rank in range(tp)
        for dp_rank in range(dp)
    ]

    assert sum(shares) == sum(piece.elements for piece in pieces(model, 0, 1))
    assert max(shares) < 1.2 * min(shares)
