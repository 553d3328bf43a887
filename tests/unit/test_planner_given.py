"""A configuration for nodes that were allocated by somebody else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import LibraConfig
from launch.hetjob import desired_steps
from planner.errors import PlanError
from planner.given import Given, GivenNodes, fitted
from planner.search import make_plan
from tests.planner_kit import QWEN2_5_1_5B, configured


def job(*components: tuple[int, int, int]) -> Given:
    """(nodes, GPUs per node, processors per node) of each component."""
    return Given("52", tuple(GivenNodes(*component) for component in components))


def config(**options: Any) -> LibraConfig:
    options = {"launch": {"mode": "allocation"}, "train_gpus": 8, "rollout_gpus": 24, "max_model_len": 2048} | options
    return configured(**options)


def sides(found: LibraConfig) -> tuple[int, int]:
    return found.train_gpus, found.rollout_gpus


def test_one_job_takes_all_gpus_in_the_ratio_that_was_meant() -> None:
    found = fitted(config(), job((2, 8, 96)), fixed=())

    assert sides(found) == (4, 12)
    assert (found.slurm.layout, found.hardware.gpus_per_node, found.hardware.cpus_per_node) == ("single", 8, 96)


def test_components_decide_the_division_themselves() -> None:
    planner = {"initial_allocation_strategy": "grp"}

    found = fitted(config(**planner), job((2, 4, 64), (3, 4, 64), (1, 4, 64)), fixed=())

    assert sides(found) == (8, 16)
    assert (found.slurm.layout, found.slurm.rollout_component_nodes) == ("hetjob", [3, 1])
    assert found.global_resource_planner.initial_allocation_strategy == "configured"


def test_instances_are_placed_on_the_components_that_there_are() -> None:
    found = fitted(config(vllm_tp_size=4), job((1, 8, 96), (2, 8, 96), (1, 8, 96)), fixed=())

    steps = [step for step in desired_steps(found, make_plan(found, QWEN2_5_1_5B)).steps if step.role == "rollout"]

    assert [(step.component, step.node) for step in steps] == [(1, 0), (1, 0), (1, 1), (1, 1), (2, 0), (2, 0)]


def test_what_does_not_divide_stays_idle() -> None:
    assert sides(fitted(config(vllm_tp_size=4, train_tp_size=2), job((1, 7, 96)), fixed=())) == (2, 4)


def test_uneven_nodes_count_as_the_smallest() -> None:
    found = fitted(config(), job((1, 8, 96), (2, 4, 32)), fixed=())

    assert (sides(found), found.hardware.gpus_per_node, found.hardware.cpus_per_node) == ((4, 8), 4, 32)


def test_for_grp_the_whole_allocation_is_divided_by_the_planner() -> None:
    found = fitted(config(initial_allocation_strategy="grp"), job((2, 8, 96)), fixed=("train_gpus",))

    plan = make_plan(found, QWEN2_5_1_5B)
    assert plan.train.gpus + plan.rollout.gpus == 16


def test_for_grp_a_sum_that_was_asked_for_is_kept() -> None:
    found = fitted(
        config(initial_allocation_strategy="grp", train_gpus=3, rollout_gpus=5),
        job((1, 16, 96)),
        fixed=("train_gpus", "rollout_gpus"),
    )

    assert sum(sides(found)) == 8


def test_a_side_that_was_asked_for_stays_and_the_other_takes_the_rest() -> None:
    assert sides(fitted(config(train_gpus=2), job((1, 8, 96)), fixed=("train_gpus",))) == (2, 6)
    assert sides(fitted(config(rollout_gpus=2), job((1, 8, 96)), fixed=("rollout_gpus",))) == (6, 2)


def test_sides_that_were_asked_for_may_leave_gpus_idle() -> None:
    found = fitted(config(train_gpus=4, rollout_gpus=2), job((2, 4, 64)), fixed=("train_gpus", "rollout_gpus"))

    assert sides(found) == (4, 2)
    assert make_plan(found, QWEN2_5_1_5B).rollout.instances[0].node == 1


@pytest.mark.parametrize(
    ("options", "fixed", "message"),
    [
        (
            {"train_gpus": 8, "rollout_gpus": 8},
            ("train_gpus", "rollout_gpus"),
            "train_gpus=8 and rollout_gpus=8 cannot be had",
        ),
        (
            {"train_gpus": 9},
            ("train_gpus",),
            r"train_gpus=9 cannot be had from job 52: 1 node\(s\) with 8 GPUs and 96 proc",
        ),
        ({"vllm_tp_size": 16}, (), "vllm_tp_size=16 is more than hardware.gpus_per_node=8"),
        ({"slurm": {"layout": "hetjob"}}, ("slurm.layout",), "slurm.layout=hetjob wants several components"),
        ({"hardware": {"gpus_per_node": 16}}, ("hardware.gpus_per_node",), "hardware.gpus_per_node=16, available 8"),
    ],
)
def test_what_cannot_be_had_is_refused_with_wanted_and_available(
    options: dict[str, Any], fixed: tuple[str, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        fitted(config(**options), job((1, 8, 96)), fixed)

    assert "launch.mode=slurm submits a job of its own instead" in str(caught.value) or "leave it out" in str(
        caught.value
    )


def test_a_component_too_many_is_refused_where_one_was_asked_for() -> None:
    with pytest.raises(PlanError, match=r"slurm\.layout=single wants one component, available job 52: 1 node"):
        fitted(config(slurm={"layout": "single"}), job((1, 8, 96), (1, 8, 96)), fixed=("slurm.layout",))


def test_too_few_processors_are_named() -> None:
    with pytest.raises(PlanError, match=r"wants \d+ processors .* allocate more, or launch\.mode=slurm"):
        fitted(config(), job((1, 8, 4)), fixed=())


def test_nodes_without_gpus_are_no_place_for_a_gpu_run() -> None:
    with pytest.raises(PlanError, match=r"hardware\.device=cuda wants GPUs, available none"):
        fitted(config(), job((1, 0, 96)), fixed=())


def test_a_run_on_processors_needs_no_gpus() -> None:
    cpu = config(hardware={"device": "cpu", "gpus_per_node": 4, "threads_per_core": 1}, train_gpus=1, rollout_gpus=1)

    found = fitted(cpu, job((2, 0, 8)), fixed=())

    assert (found.slurm.gpu_flag, found.hardware.gpus_per_node, sides(found)) == ("none", 4, (4, 4))


@given(
    nodes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), min_size=1, max_size=4),
    train=st.integers(1, 64),
    rollout=st.integers(1, 64),
    train_tp=st.sampled_from([1, 2]),  # what the model can be divided by
    tp=st.sampled_from([1, 2, 4]),
)
def test_every_step_of_a_fitted_plan_is_inside_what_was_given(
    nodes: list[tuple[int, int]], train: int, rollout: int, train_tp: int, tp: int
) -> None:
    allocated = job(*((count, gpus, 96) for count, gpus in nodes))
    wish = config(train_gpus=train, rollout_gpus=rollout, train_tp_size=train_tp, vllm_tp_size=tp, batch_size=512)
    try:
        found = fitted(wish, allocated, fixed=())
    except PlanError:
        return

    used: dict[tuple[int, int], list[int]] = {}
    for step in desired_steps(found, make_plan(found, QWEN2_5_1_5B)).steps:
        for node in range(step.node, step.node + step.nodes):
            place = used.setdefault((step.component, node), [0, 0])
            place[0] += step.gpus_per_node
            place[1] += step.tasks_per_node * step.cpus_per_task
    for (component, node), (gpus, cpus) in used.items():
        assert node < allocated.components[component].nodes
        assert gpus <= allocated.components[component].gpus_per_node
        assert cpus <= allocated.components[component].cpus_per_node
