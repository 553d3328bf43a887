"""Plans: what fits, what is refused, and that the numbers add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import LibraConfig
from launch.compose import compose
from planner.architecture import Architecture
from planner.describe import describe
from planner.errors import PlanError
from planner.memory import recompute_logits_bytes
from planner.model import from_hf, from_model_config
from planner.plan import Plan
from planner.search import make_plan


def plan_of(*overrides: str) -> Plan:
    config = compose(["launch.mode=slurm", *overrides])
    return make_plan(config, from_model_config(config.model))


def test_seven_billion_parameters_on_one_node_a_side_fit() -> None:
    plan = plan_of("+experiment=grpo_7b")

    assert (plan.layout, plan.train.tp, plan.train.dp, len(plan.rollout.instances)) == ("hetjob", 4, 2, 8)
    assert all(terms["total"] <= terms["budget"] for terms in plan.memory_bytes.values())


def test_parameter_count_matches_the_public_model() -> None:
    config = compose(["model=qwen2_5_7b"])

    assert from_model_config(config.model).parameters == pytest.approx(7.615e9, rel=2e-3)


def test_the_logits_term_equals_the_reference_formula() -> None:
    arch = Architecture("Qwen3ForCausalLM", 40, 5120, 17408, 40, 8, 128, 151936, False, 40960)
    config = replace(LibraConfig(), max_model_len=40960, recompute_micro_batch_size=1)

    found = recompute_logits_bytes(config, arch, tp=4, micro_batch=4)

    assert found == int(1 * 40959 * 37984 * 4 * 1.5)


def test_a_plan_reads_back_from_json() -> None:
    plan = plan_of("+experiment=grpo_7b")

    assert Plan.from_dict(plan.to_dict() | {"run_id": "x"}) == plan


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["train_tp_size=1"], "train_tp_size=2 would fit"),
        (["train_gpus=12"], "set train_gpus to 8 or 16"),
        (["rollout_gpus=20"], "set rollout_gpus to 16 or 24"),
        (["train_tp_size=8"], "does not divide the model's 28 attention heads"),
        (["train_gpus=7"], "not a multiple of train_tp_size"),
        (["vllm_tp_size=16", "rollout_gpus=16"], "must fit on one node"),
        (["vllm_tp_size=3", "rollout_gpus=8"], "not a multiple of vllm_tp_size=3"),
        (["global_resource_planner.min_train_gpus=16"], "min_train_gpus=16"),
        (["max_model_len=2000000"], "change train_tp_size, micro_batch_size or train_gpus"),
    ],
)
def test_an_impossible_split_names_the_option_to_change(overrides: list[str], wanted: str) -> None:
    with pytest.raises(PlanError, match=wanted.replace(".", r"\.")):
        plan_of("+experiment=grpo_7b", *overrides)


def test_a_local_run_that_is_too_big_for_the_machine_is_refused() -> None:
    config = compose(["+experiment=demo", "rollout_gpus=4"])

    with pytest.raises(PlanError, match="do not fit on this machine"):
        make_plan(config, from_model_config(config.model))


def test_an_unsupported_architecture_lists_what_is_supported() -> None:
    with pytest.raises(PlanError, match="supported: LlamaForCausalLM"):
        from_hf({"architectures": ["GPT2LMHeadModel"]})


def test_missing_sizes_name_the_ways_to_give_them() -> None:
    with pytest.raises(PlanError, match="set model_path to a HF folder"):
        from_model_config(compose([]).model)


def test_rejected_branches_carry_a_reason() -> None:
    plan = plan_of("+experiment=grpo_7b")

    assert {cut.branch for cut in plan.rejected} == {"train_tp_size=1", "train_tp_size=8"}
    assert "rejected   train_tp_size=1: needs" in describe(plan)


@given(
    nodes=st.integers(1, 16),
    rollout_nodes=st.integers(1, 16),
    tp=st.sampled_from([1, 2, 4]),
    rollout_tp=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(["hetjob", "single"]),
)
def test_any_plan_is_whole(nodes: int, rollout_nodes: int, tp: int, rollout_tp: int, layout: str) -> None:
    base = CONFIG
    config = replace(
        base,
        train_gpus=nodes * 8,
        rollout_gpus=rollout_nodes * 8,
        train_tp_size=tp,
        vllm_tp_size=rollout_tp,
        slurm=replace(base.slurm, layout=layout),
        hardware=replace(base.hardware, gpu_memory_bytes=1e13),
    )

    plan = make_plan(config, from_model_config(config.model))

    train = plan.train
    assert train.tp * train.pp * train.cp * train.dp == train.gpus == train.nodes * train.gpus_per_node
    assert sum(placement.tp for placement in plan.rollout.instances) == plan.rollout.gpus
    assert len({placement.name for placement in plan.rollout.instances}) == len(plan.rollout.instances)
    per_node: dict[tuple[int, int], int] = {}
    for placement in plan.rollout.instances:
        key = (placement.component, placement.node)
        per_node[key] = per_node.get(key, 0) + placement.tp
    assert max(per_node.values()) <= config.hardware.gpus_per_node
    for terms in plan.memory_bytes.values():
        parts = [value for name, value in terms.items() if name not in ("total", "budget")]
        assert min(parts) >= 0
        assert terms["total"] == pytest.approx(sum(parts))


CONFIG = compose(["+experiment=grpo_7b", "launch.mode=slurm"])
