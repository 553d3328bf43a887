"""Bytes on a GPU: as measured, by the reference's formula where it has one, and in the right direction everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.architecture import Architecture
from planner.errors import PlanError
from planner.limits import check_trainer_memory
from planner.memory import (
    FRAGMENTATION,
    HEAD_CHUNK_BYTES,
    host_bytes,
    key_value_capacity_tokens,
    recompute_logits_bytes,
    rollout_bytes,
    trainer_budget_bytes,
    trainer_bytes,
)
from planner.search import make_plan
from stages.trainer.head import CHUNK_BYTES
from tests.planner_kit import (
    EIGHT_LAYERS_OF_7B,
    QWEN2_5_1_5B,
    QWEN2_5_7B,
    QWEN3_14B,
    QWEN3_30B_A3B,
    configured,
)

OFFLOAD = {"megatron_optimizer_cpu_offload": True}


@pytest.mark.parametrize(
    ("arch", "micro_batch", "tp", "dp", "peak_gb"),
    [
        (QWEN2_5_1_5B, 4, 1, 1, 55.7),
        (QWEN2_5_1_5B, 4, 2, 1, 29.7),
        (QWEN2_5_1_5B, 4, 1, 2, 46.4),
        (EIGHT_LAYERS_OF_7B, 1, 1, 1, 65.1),
        (EIGHT_LAYERS_OF_7B, 1, 2, 1, 32.6),
        (EIGHT_LAYERS_OF_7B, 1, 1, 2, 43.2),
    ],
)
def test_the_trainers_memory_is_within_a_twentieth_of_the_measured_peak(
    arch: Architecture, micro_batch: int, tp: int, dp: int, peak_gb: float
) -> None:
    """Peaks of docs/benchmarks.md: 2,048 tokens, no more logits at once than the head's chunk."""
    sizes = {"train_gpus": tp * dp, "train_tp_size": tp, "micro_batch_size": micro_batch, "max_model_len": 2048}

    terms = trainer_bytes(configured(**sizes, recompute_logprobs=False), arch)

    assert terms["total"] / 1e9 == pytest.approx(peak_gb, rel=0.05)


def test_the_heads_chunk_is_the_trainers() -> None:
    assert HEAD_CHUNK_BYTES == CHUNK_BYTES


def test_the_logits_term_equals_the_reference_formula() -> None:
    config = configured(train_gpus=4, train_tp_size=4, max_model_len=40960, recompute_micro_batch_size=1)

    assert recompute_logits_bytes(config, QWEN3_14B) == int(1 * 40959 * 37984 * 4 * 1.5)


@pytest.mark.exercises("global_resource_planner.memory_budget_check_enabled")
def test_without_the_check_the_recompute_pass_is_left_out_of_the_budget() -> None:
    checked, unchecked = (configured(memory_budget_check_enabled=on) for on in (True, False))

    assert trainer_bytes(checked, QWEN2_5_7B)["recompute_logits"] > 0
    assert trainer_bytes(unchecked, QWEN2_5_7B)["recompute_logits"] == 0


@pytest.mark.exercises("global_resource_planner.memory_budget_check_enabled")
def test_a_plan_that_only_the_recompute_pass_makes_too_big_is_made_without_the_check() -> None:
    sizes: dict[str, Any] = {"train_gpus": 8, "train_tp_size": 4, "micro_batch_size": 1, "rollout_gpus": 8}
    sizes |= {"max_model_len": 16384, "memory_budget_workspace_factor": 4.0}

    with pytest.raises(PlanError, match="recompute_logits"):
        make_plan(configured(**sizes), QWEN2_5_7B)
    assert make_plan(configured(**sizes, memory_budget_check_enabled=False), QWEN2_5_7B).train.tp == 4


@pytest.mark.exercises("global_resource_planner.memory_budget_safety_margin_bytes")
def test_the_safety_margin_is_taken_off_the_budget_and_decides_what_fits() -> None:
    config = configured(train_gpus=8, train_tp_size=2, micro_batch_size=1, max_model_len=4096)
    left = trainer_budget_bytes(config) - trainer_bytes(config, QWEN2_5_7B)["total"]
    planner = config.global_resource_planner
    margin = planner.memory_budget_safety_margin_bytes + left + 1e6
    tight = replace(config, global_resource_planner=replace(planner, memory_budget_safety_margin_bytes=margin))

    check_trainer_memory(config, QWEN2_5_7B)

    assert trainer_budget_bytes(tight) == 80e9 * (1 - FRAGMENTATION) - margin
    with pytest.raises(PlanError, match="training wants"):
        check_trainer_memory(tight, QWEN2_5_7B)


@pytest.mark.exercises("global_resource_planner.memory_budget_logits_dtype_bytes")
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_width_of_a_logit_scales_the_recompute_term(width: int) -> None:
    config = configured(memory_budget_logits_dtype_bytes=width, max_model_len=2048)

    assert recompute_logits_bytes(config, QWEN3_14B) == int(2047 * 151936 * width * 1.5)


@pytest.mark.exercises("global_resource_planner.memory_budget_workspace_factor")
@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0])
def test_the_workspace_factor_multiplies_the_recompute_term(factor: float) -> None:
    config = configured(memory_budget_workspace_factor=factor, max_model_len=2048)

    assert recompute_logits_bytes(config, QWEN3_14B) == int(2047 * 151936 * 4 * factor)


@pytest.mark.exercises("recompute_micro_batch_size")
def test_a_larger_micro_batch_of_the_recompute_pass_takes_more_memory_up_to_the_training_one() -> None:
    one, four, eight = (
        recompute_logits_bytes(configured(micro_batch_size=4, recompute_micro_batch_size=size), QWEN3_14B)
        for size in (1, 4, 8)
    )

    assert four == eight == pytest.approx(4 * one)


@pytest.mark.exercises("megatron_optimizer_offload_fraction", "megatron_optimizer_cpu_offload")
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_offloading_moves_its_share_of_the_optimizer_to_the_host(fraction: float) -> None:
    sizes: dict[str, Any] = {"train_gpus": 8, "train_tp_size": 4}
    offloaded = configured(**sizes, **OFFLOAD, megatron_optimizer_offload_fraction=fraction)

    before, after = trainer_bytes(configured(**sizes), QWEN2_5_7B), trainer_bytes(offloaded, QWEN2_5_7B)

    own = QWEN2_5_7B.parameters / 4 / 2
    assert before["optimizer"] - after["optimizer"] == pytest.approx(own * 12 * fraction)
    assert before["total"] - after["total"] == pytest.approx(own * 12 * fraction)
    assert host_bytes(configured(**sizes), QWEN2_5_7B) == {}
    assert host_bytes(offloaded, QWEN2_5_7B)["host_optimizer"] == pytest.approx(8 * own * 16 * fraction)


def test_a_fraction_without_the_switch_moves_nothing() -> None:
    config = configured(megatron_optimizer_offload_fraction=1.0)

    assert trainer_bytes(config, QWEN2_5_7B) == trainer_bytes(configured(), QWEN2_5_7B)


@pytest.mark.exercises("megatron_optimizer_offload_fraction")
def test_a_plan_that_does_not_fit_fits_with_the_optimizer_on_the_host_and_reports_it_apart() -> None:
    sizes: dict[str, Any] = {"train_gpus": 8, "train_tp_size": 8, "micro_batch_size": 1, "rollout_gpus": 8}
    sizes |= {"vllm_tp_size": 4, "max_model_len": 2048}
    large = replace(QWEN3_14B, layers=80, hidden=5120)

    with pytest.raises(PlanError, match="optimizer"):
        make_plan(configured(**sizes), large)
    plan = make_plan(configured(**sizes, **OFFLOAD, megatron_optimizer_offload_fraction=1.0), large)

    assert plan.memory_bytes["trainer"]["optimizer"] == 0
    assert plan.memory_bytes["trainer_host"]["host_optimizer"] == pytest.approx(large.parameters * 16)
    assert "host_optimizer" not in plan.memory_bytes["trainer"]


def test_an_offloaded_optimizer_that_the_node_cannot_hold_is_refused() -> None:
    config = configured(**OFFLOAD, megatron_optimizer_offload_fraction=1.0, slurm={"mem_per_node_bytes": 64e9})

    with pytest.raises(PlanError, match=r"offloading the optimizer wants .* available 64\.00 GB; change slurm"):
        check_trainer_memory(replace(config, train_gpus=8, train_tp_size=4, micro_batch_size=1), QWEN2_5_7B)


def test_every_expert_takes_memory_whether_or_not_a_token_visits_it() -> None:
    config = configured(train_gpus=8, train_tp_size=4)

    terms = trainer_bytes(config, QWEN3_30B_A3B)

    assert terms["weights"] == QWEN3_30B_A3B.parameters / 4 * 2
    assert rollout_bytes(config, QWEN3_30B_A3B)["weights"] == QWEN3_30B_A3B.parameters * 2


def test_activations_of_experts_grow_with_those_that_a_token_visits() -> None:
    config = configured(train_gpus=8, train_tp_size=4)
    few, many = (replace(QWEN3_30B_A3B, experts_per_token=count) for count in (4, 8))

    assert trainer_bytes(config, few)["activations"] < trainer_bytes(config, many)["activations"]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_cache_holds_what_the_budget_leaves_on_each_gpu(tp: int) -> None:
    config = configured(vllm_tp_size=tp, rollout_gpus=8)

    tokens = key_value_capacity_tokens(config, QWEN3_14B)

    cache = tokens * 2 * 40 * (8 // tp) * 128 * 2
    terms = rollout_bytes(config, QWEN3_14B)
    used = terms["weights"] + terms["sampler"] + cache
    assert used <= terms["budget"] < used + 2 * 40 * 8 * 128 * 2


def test_on_cpu_the_cache_is_as_large_as_it_was_told() -> None:
    config = configured(hardware={"device": "cpu"}, rollout={"kv_cache_bytes": 1e9})

    assert key_value_capacity_tokens(config, QWEN2_5_1_5B) == int(1e9 // (2 * 28 * 2 * 128 * 2))


SIZES = st.fixed_dictionaries(
    {
        "train_gpus": st.sampled_from([1, 2, 4, 8, 16, 32]),
        "rollout_gpus": st.sampled_from([1, 2, 4, 8, 16]),
        "train_tp_size": st.sampled_from([1, 2, 4]),
        "vllm_tp_size": st.sampled_from([1, 2, 4]),
        "micro_batch_size": st.integers(1, 8),
        "recompute_micro_batch_size": st.integers(1, 8),
        "max_model_len": st.sampled_from([256, 2048, 8192, 32768]),
        "megatron_optimizer_cpu_offload": st.booleans(),
        "megatron_optimizer_offload_fraction": st.sampled_from([0.0, 0.3, 1.0]),
        "memory_budget_check_enabled": st.booleans(),
        "initial_allocation_strategy": st.sampled_from(["configured", "grp"]),
    }
)
MODELS = st.sampled_from([QWEN2_5_1_5B, QWEN2_5_7B, QWEN3_14B, QWEN3_30B_A3B])


@given(sizes=SIZES, arch=MODELS, memory_gb=st.floats(10, 300))
def test_no_plan_takes_more_than_its_budget(sizes: dict[str, Any], arch: Architecture, memory_gb: float) -> None:
    config = configured(**sizes, hardware={"gpu_memory_bytes": memory_gb * 1e9})

    try:
        plan = make_plan(config, arch)
    except PlanError:
        return

    for side in ("trainer", "rollout"):
        terms = plan.memory_bytes[side]
        parts = [value for name, value in terms.items() if name not in ("total", "budget")]
        assert min(parts) >= 0
        assert terms["total"] == pytest.approx(sum(parts))
        assert terms["total"] <= terms["budget"]


@given(sizes=SIZES, arch=MODELS, memory_gb=st.floats(10, 300), more_gb=st.floats(0, 100))
def test_more_memory_never_rules_out_what_fitted(
    sizes: dict[str, Any], arch: Architecture, memory_gb: float, more_gb: float
) -> None:
    config = configured(**sizes, hardware={"gpu_memory_bytes": memory_gb * 1e9})
    larger = configured(**sizes, hardware={"gpu_memory_bytes": (memory_gb + more_gb) * 1e9})

    try:
        plan = make_plan(config, arch)
    except PlanError:
        return

    assert make_plan(larger, arch).predicted["step_s"] <= plan.predicted["step_s"]


@given(sizes=SIZES, arch=MODELS, factor=st.integers(2, 8))
def test_more_replicas_never_take_more_memory_on_a_rank(sizes: dict[str, Any], arch: Architecture, factor: int) -> None:
    """The search cuts a branch at the first size that does not fit."""
    config = configured(**sizes)
    smaller = replace(config, train_gpus=max(config.train_gpus, config.train_tp_size))
    larger = replace(smaller, train_gpus=smaller.train_gpus * factor)

    assert trainer_bytes(larger, arch)["total"] <= trainer_bytes(smaller, arch)["total"]
    assert sum(host_bytes(larger, arch).values()) <= sum(host_bytes(smaller, arch).values()) * (1 + 1e-9)
