"""Plans: what fits, what is refused, and that the numbers add up."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.compose import compose
from planner.describe import describe
from planner.errors import PlanError
from planner.model import from_model_config
from planner.plan import Plan
from planner.search import make_plan

SPLIT = ("train_gpus=8", "rollout_gpus=8", "train_tp_size=4", "vllm_tp_size=1", "micro_batch_size=1")


def plan_of(*overrides: str) -> Plan:
    """The 7B experiment on two nodes of eight GPUs, with TP 4."""
    config = compose(["+experiment=grpo_7b", "launch.mode=slurm", *SPLIT, *overrides])
    return make_plan(config, from_model_config(config.model))


def test_seven_billion_parameters_on_one_node_a_side_fit() -> None:
    plan = plan_of()

    assert (plan.layout, plan.train.tp, plan.train.dp, len(plan.rollout.instances)) == ("hetjob", 4, 2, 8)
    assert all(terms["total"] <= terms["budget"] for terms in plan.memory_bytes.values())


def test_a_plan_reads_back_from_json() -> None:
    plan = plan_of()

    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict() | {"run_id": "x"}))) == plan


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
        plan_of(*overrides)


def test_a_local_run_that_is_too_big_for_the_machine_is_refused() -> None:
    config = compose(["+experiment=demo", "rollout_gpus=4"])

    with pytest.raises(PlanError, match="do not fit on this machine"):
        make_plan(config, from_model_config(config.model))


def test_processors_that_a_node_does_not_have_are_refused_before_the_job_is_written() -> None:
    few = ["hardware.gpus_per_node=4", "hardware.cpus_per_node=4", "hardware.threads_per_core=1"]
    few += ["train_tp_size=2", "vllm_tp_size=1"]

    with pytest.raises(PlanError, match=r"wants 5 processors .* available hardware\.cpus_per_node=4"):
        plan_of(*few, "train_gpus=4", "rollout_gpus=4")


def test_a_plan_that_is_not_the_best_known_says_what_grp_would_choose() -> None:
    plan = plan_of("train_gpus=8", "rollout_gpus=24", "train_tp_size=4")

    assert plan.alternative is not None
    assert plan.alternative.step_s < plan.predicted["step_s"]
    assert f"grp        would choose train_gpus={plan.alternative.train_gpus}" in describe(plan)


def test_a_plan_that_is_the_best_known_says_nothing_of_grp() -> None:
    best = plan_of("train_gpus=8", "rollout_gpus=24").alternative
    assert best is not None
    given = [
        f"train_gpus={best.train_gpus}",
        f"rollout_gpus={best.rollout_gpus}",
        f"train_tp_size={best.train_tp_size}",
    ]

    plan = plan_of(*given)

    assert plan.alternative is None
    assert "would choose" not in describe(plan)


def test_rejected_branches_carry_a_reason() -> None:
    plan = plan_of()

    assert {cut.branch for cut in plan.rejected} == {"train_tp_size=1", "train_tp_size=8"}
    assert re.search(
        r"rejected   train_tp_size=1: training wants [\d.]+ GB on each GPU, available 71.60 GB", describe(plan)
    )


def test_the_description_says_what_the_times_assume() -> None:
    text = describe(plan_of())

    assert "every trajectory counted with max_model_len tokens" in text
    assert "hardware bounds" in text


def test_the_description_tells_memory_of_the_host_from_that_of_a_gpu() -> None:
    text = describe(plan_of("megatron_optimizer_cpu_offload=true", "megatron_optimizer_offload_fraction=0.5"))

    assert re.search(r"memory     trainer: [\d.]+ of 71.6 GB per GPU \(", text)
    assert re.search(r"memory     trainer: [\d.]+ GB of host memory per node \(host_optimizer", text)


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
