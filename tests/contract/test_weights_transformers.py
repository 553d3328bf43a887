"""A published version is an ordinary HF folder: transformers loads it and computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from conf.sections import WeightsConfig
from stages.rundir import RunDir
from stages.weights.manifest import model_config_digest
from stages.weights.publish import publish
from stages.weights.tensors import LocalTensor
from tests.weights_kit import PROBE

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def untied_llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))


def tied_qwen() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))


@pytest.mark.parametrize("make", [untied_llama, tied_qwen])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_file_bytes", [1e9, 20_000], ids=["one file", "several files"])
def test_transformers_loads_what_was_published(tmp_path: Path, make: Any, dtype: str, max_file_bytes: float) -> None:
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path / "source")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    run = RunDir.create(tmp_path / "run")

    manifest = publish(
        run,
        version=7,
        step=7,
        tensors=[LocalTensor.whole(name, parameter) for name, parameter in model.named_parameters()],
        probe=PROBE,
        source_folder=tmp_path / "source",
        options=WeightsConfig(dtype=dtype, max_file_bytes=max_file_bytes),
    )
    loaded = AutoModelForCausalLM.from_pretrained(run.weights_version(7), local_files_only=True)

    assert (len([name for name in manifest.files if name.endswith(".safetensors")]) > 1) == (max_file_bytes < 1e9)
    assert loaded.dtype == getattr(torch, dtype)
    found = dict(loaded.named_parameters())
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.to(loaded.dtype))
    if dtype == "float32":
        tokens = torch.tensor([[1, 5, 9, 60, 2]])
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_the_published_config_names_the_architecture_of_the_source(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path / "source")
    run = RunDir.create(tmp_path / "run")

    manifest = publish(
        run,
        version=0,
        step=0,
        tensors=[LocalTensor.whole(name, parameter) for name, parameter in model.named_parameters()],
        probe=PROBE,
        source_folder=tmp_path / "source",
        options=WeightsConfig(dtype="bfloat16"),
    )

    config = json.loads((tmp_path / "source" / "config.json").read_text())
    assert manifest.model_config_digest == model_config_digest(config)
    assert manifest.model_config_digest != model_config_digest({**config, "hidden_size": 64})
