"""config.json decides, before anything starts, whether the trainer can train a model exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.trainer.architecture import (
    Llama3Rope,
    ModelFolderError,
    TensorParallelError,
    UnsupportedModelError,
    check_supported,
    check_tensor_parallel,
    read_architecture,
    read_config,
)


def hf_config(name: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [name],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 101,
        "max_position_embeddings": 512,
        **changes,
    }


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_each_family_is_read_with_its_own_extras(name: str) -> None:
    architecture = read_architecture(hf_config(name, head_dim=16))

    assert architecture.qkv_bias == (name == "Qwen2ForCausalLM")
    assert architecture.qk_norm == (name == "Qwen3ForCausalLM")
    assert (architecture.num_heads, architecture.num_kv_heads, architecture.head_dim) == (8, 4, 16)


def test_head_dim_follows_from_the_width_when_it_is_not_given() -> None:
    assert read_architecture(hf_config(head_dim=None)).head_dim == 8


def test_a_model_without_key_value_heads_has_as_many_as_query_heads() -> None:
    assert read_architecture(hf_config(num_key_value_heads=None)).num_kv_heads == 8


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3", "rope_type": None}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
    ids=["old", "older", "transformers 5"],
)
def test_rope_is_read_from_old_and_new_files_alike(keys: dict[str, Any]) -> None:
    architecture = read_architecture(hf_config(**keys))

    assert architecture.rope_theta == 5e5
    assert architecture.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architectures": ["MixtralForCausalLM"]}, "supported: LlamaForCausalLM"),
        ({"architectures": None}, "supported: LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'; supported: default, llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "without 'low_freq_factor'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias True; supported: false"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act gelu; supported: silu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": None}, "hidden_size None"),
        ({"vocab_size": 0}, "vocab_size 0"),
    ],
)
def test_what_the_trainer_would_compute_differently_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_supported(hf_config(**change))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_sizes_that_divide_are_accepted(tp: int) -> None:
    check_tensor_parallel(read_architecture(hf_config()), tp)


def test_a_split_that_does_not_divide_the_heads_names_those_that_do() -> None:
    with pytest.raises(TensorParallelError, match=r"train_tp_size 3 .* one of \[1, 2, 4\]"):
        check_tensor_parallel(read_architecture(hf_config(intermediate_size=88)), 3)


def test_a_vocabulary_with_fewer_rows_than_the_last_rank_needs_is_refused() -> None:
    with pytest.raises(TensorParallelError, match="vocab_size 5"):
        check_tensor_parallel(replace(read_architecture(hf_config()), vocab_size=5), 4)


def test_a_missing_folder_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="set model_path"):
        read_config(tmp_path / "nowhere")


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match="not readable"):
        read_config(tmp_path)


def test_a_config_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    assert read_config(tmp_path) == hf_config()


def test_the_launcher_can_ask_without_importing_torch() -> None:
    program = "import sys, stages.trainer.architecture, stages.trainer.mapping; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
