"""Sizes of models: as published, as transformers builds them, and as config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from conf.sections import ModelConfig
from launch.compose import compose
from planner.architecture import Architecture
from planner.errors import PlanError
from planner.model import from_hf, from_model_config, resolve

PUBLISHED = {
    "llama3_1_8b": 8_030_261_248,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_30b_a3b": 30_532_122_624,
    "smollm2_135m": 134_515_008,
}
"""Elements of the safetensors files on the models' pages."""

TINY: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MOE: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], **TINY, **EXPERTS}
CLASSES: dict[str, Any] = {
    "LlamaForCausalLM": LlamaConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_parameters_are_those_of_the_published_model(model: str) -> None:
    assert from_model_config(compose([f"model={model}"]).model).parameters == PUBLISHED[model]


def test_a_token_visits_three_of_thirty_billion_parameters() -> None:
    arch = from_model_config(compose(["model=qwen3_30b_a3b"]).model)

    assert arch.active_parameters == pytest.approx(3.35e9, rel=3e-3)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_that_transformers_makes(name: str, tied: bool) -> None:
    sizes = TINY | (EXPERTS if name == "Qwen3MoeForCausalLM" else {})
    config = CLASSES[name](**sizes, tie_word_embeddings=tied, architectures=[name])

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    assert from_hf(config.to_dict()).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_group_file_and_config_json_of_one_model_agree() -> None:
    arch = from_hf(MOE)

    assert from_model_config(ModelConfig("Qwen3MoeForCausalLM", **TINY, **EXPERTS)) == arch
    assert resolve(MOE, ModelConfig("Qwen3MoeForCausalLM", **TINY, **EXPERTS)) == arch


def test_what_the_model_group_leaves_open_is_read_from_config_json() -> None:
    hf_config = MOE | {"tie_word_embeddings": True, "rope_theta": 5e5, "max_position_embeddings": 4096}

    arch = resolve(hf_config, ModelConfig())

    assert (arch.tied, arch.max_positions, arch.num_experts, arch.head_dim) == (True, 4096, 8, 16)


@pytest.mark.parametrize(
    ("option", "value", "theirs"),
    [
        ("hidden_size", 64, "48"),
        ("num_hidden_layers", 4, "3"),
        ("head_dim", 8, "16"),
        ("num_experts", 16, "8"),
        ("moe_intermediate_size", 32, "24"),
        ("architecture", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        ("tie_word_embeddings", True, "False"),
        ("rope_theta", 1e4, "1000000.0"),
        ("max_position_embeddings", 4097, "4096"),
    ],
)
def test_a_size_that_contradicts_config_json_is_refused_with_both_numbers(option: str, value: Any, theirs: str) -> None:
    hf_config = MOE | {"rope_parameters": {"rope_theta": 1e6}, "max_position_embeddings": 4096}

    with pytest.raises(
        PlanError, match=rf"model\.{option}={value}, config\.json has (only )?{theirs}.*model=from_path"
    ):
        resolve(hf_config, replace(ModelConfig(), **{option: value}))


def test_a_lower_limit_of_positions_is_no_contradiction() -> None:
    model = replace(ModelConfig(), max_position_embeddings=2048)

    assert resolve(MOE | {"max_position_embeddings": 4096}, model).max_positions == 2048


def test_without_a_folder_the_model_group_decides() -> None:
    assert resolve(None, ModelConfig("LlamaForCausalLM", **TINY)).hidden == 48


@pytest.mark.parametrize(("key", "value"), [("decoder_sparse_step", 2), ("mlp_only_layers", [0])])
def test_a_model_with_experts_in_some_layers_only_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"{key} .*experts in every layer"):
        from_hf(MOE | {key: value})


def test_experts_are_read_under_the_name_that_transformers_5_writes() -> None:
    hf_config = {key: value for key, value in MOE.items() if key != "num_experts"}

    assert from_hf(hf_config | {"num_local_experts": 8}) == from_hf(MOE)


def test_a_qwen3_without_head_dim_has_the_one_of_its_class() -> None:
    hf_config = {"architectures": ["Qwen3ForCausalLM"], **TINY, "head_dim": None}

    assert from_hf(hf_config).head_dim == Qwen3Config().head_dim


@pytest.mark.parametrize(
    ("hf_config", "wanted"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "supported: LlamaForCausalLM"),
        ({}, r"\(none\)"),
        (MOE | {"hidden_size": "48"}, "hidden_size '48'; wanted a whole number"),
        (MOE | {"num_key_value_heads": 4}, "no multiple of its 4 key/value heads"),
        (MOE | {"num_experts_per_tok": 9}, "visits 9 of 8 experts"),
    ],
)
def test_a_config_json_that_cannot_be_planned_is_refused_by_name(hf_config: Mapping[str, Any], wanted: str) -> None:
    with pytest.raises(PlanError, match=wanted):
        from_hf(hf_config)


def test_missing_sizes_name_the_ways_to_give_them() -> None:
    with pytest.raises(PlanError, match=r"set model_path to a HF folder.*or set model\.num_hidden_layers"):
        from_model_config(ModelConfig())


def test_missing_sizes_of_the_experts_are_named() -> None:
    with pytest.raises(PlanError, match=r"or set model\.moe_intermediate_size$"):
        from_model_config(ModelConfig("Qwen3MoeForCausalLM", **TINY, num_experts=8, num_experts_per_tok=2))


def test_experts_of_a_dense_architecture_are_refused() -> None:
    with pytest.raises(PlanError, match=r"num_experts=8, but model\.architecture=LlamaForCausalLM has no experts"):
        from_model_config(ModelConfig("LlamaForCausalLM", **TINY, num_experts=8))


def test_one_sequence_reads_the_parameters_that_one_token_visits() -> None:
    arch = from_hf(MOE)
    embedding = arch.vocab * arch.hidden

    assert arch.parameters_read(1) == pytest.approx(arch.active_parameters - embedding)


@given(sequences=st.integers(1, 10_000))
def test_a_batch_reads_more_experts_than_one_sequence_and_never_more_than_all(sequences: int) -> None:
    arch = from_hf(MOE)
    all_of_them = arch.parameters - arch.vocab * arch.hidden

    assert arch.parameters_read(sequences) <= arch.parameters_read(sequences + 1) <= all_of_them
    assert arch.parameters_read(10_000) == pytest.approx(all_of_them)


def test_a_dense_model_reads_all_but_the_embedding_that_is_looked_up() -> None:
    arch = from_hf({"architectures": ["LlamaForCausalLM"], **TINY})
    tied = replace(arch, tied=True)

    assert arch.parameters_read(7) == arch.parameters - arch.vocab * arch.hidden
    assert tied.parameters_read(7) == tied.parameters


@pytest.mark.parametrize(("tp", "heads_kept"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_gpu_keeps_its_part_of_the_heads_and_at_least_one(tp: int, heads_kept: int) -> None:
    arch = Architecture("Qwen2ForCausalLM", 28, 3584, 18944, 28, 4, 128, 152064, False, 32768)

    assert arch.key_value_elements_per_gpu(tp) == 2 * 28 * heads_kept * 128
