"""initial_allocation_strategy=grp: the best division there is, found by looking at every one; and the options that bound it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import LibraConfig
from launch.errors import LibraError
from launch.hetjob import job_spec
from planner.allocation import adopt
from planner.architecture import Architecture
from planner.describe import describe
from planner.errors import PlanError
from planner.grp import search
from planner.plan import Choice, Plan
from planner.rejections import runs
from planner.search import make_plan
from planner.train_cost import communication_compute_ratio
from tests.planner_kit import QWEN2_5_1_5B, QWEN2_5_7B, QWEN3_14B, QWEN3_30B_A3B, configured

GRP = {"initial_allocation_strategy": "grp"}
NODE = {
    "train_gpus": 8,
    "rollout_gpus": 8,
    "max_model_len": 4096,
    "micro_batch_size": 1,
    "max_concurrent_rollouts": 4096,
}


def divide(arch: Architecture = QWEN2_5_7B, **options: Any) -> Plan:
    return make_plan(configured(**GRP, **(NODE | options)), arch)


def split_of(plan: Plan) -> tuple[int, int, int]:
    return plan.train.gpus, plan.rollout.gpus, plan.train.tp


def brute_force(config: LibraConfig, arch: Architecture) -> dict[tuple[int, int, int], tuple[float, float]]:
    """(train_s, generate_s) of every division that works when somebody asks for exactly it, up to its job script."""
    total, planner = config.train_gpus + config.rollout_gpus, config.global_resource_planner
    asked = replace(config, global_resource_planner=replace(planner, initial_allocation_strategy="configured"))
    found = {}
    for train_gpus, tp in product(range(1, total), planner.allowed_train_tp or (1, 2, 4, 8)):
        split = replace(asked, train_gpus=train_gpus, rollout_gpus=total - train_gpus, train_tp_size=tp)
        try:
            plan = make_plan(split, arch)
            if config.launch.mode == "slurm":
                job_spec(split, plan, Path("/runs/x"))
        except (PlanError, LibraError):
            continue
        found[train_gpus, total - train_gpus, tp] = (plan.predicted["train_s"], plan.predicted["generate_s"])
    return found


CASES = st.fixed_dictionaries(
    {
        "train_gpus": st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
        "rollout_gpus": st.sampled_from([1, 2, 4, 8, 12]),
        "vllm_tp_size": st.sampled_from([1, 1, 1, 2]),
        "batch_size": st.sampled_from([4, 64, 512]),
        "n_samples": st.sampled_from([1, 4]),
        "max_model_len": st.sampled_from([512, 4096, 16384]),
        "micro_batch_size": st.sampled_from([1, 2]),
        "allocation_granularity_gpus": st.sampled_from([1, 1, 1, 2]),
        "min_train_gpus": st.sampled_from([1, 1, 1, 3]),
        "min_rollout_gpus": st.sampled_from([1, 1, 1, 2]),
        "allowed_train_tp": st.sampled_from([[], [], [], [1, 2], [4], [2, 3]]),
        "train_comm_compute_ratio_threshold": st.sampled_from([None, None, None, 0.05, 0.2, 0.5]),
        "hardware": st.fixed_dictionaries(
            {
                "gpus_per_node": st.sampled_from([2, 4, 8]),
                "cpus_per_node": st.sampled_from([8, 96]),
                "gpu_memory_bytes": st.sampled_from([40e9, 80e9, 141e9]),
            }
        ),
        "slurm": st.fixed_dictionaries({"layout": st.sampled_from(["hetjob", "single"])}),
        "launch": st.fixed_dictionaries({"mode": st.sampled_from(["slurm", "slurm", "local"])}),
    }
)


@given(case=CASES, arch=st.sampled_from([QWEN2_5_1_5B, QWEN2_5_7B, QWEN3_30B_A3B]))
@settings(max_examples=150, deadline=None)
def test_the_search_finds_what_looking_at_every_division_finds(case: dict[str, Any], arch: Architecture) -> None:
    config = configured(**GRP, **case)
    every = brute_force(config, arch)

    if not every:
        with pytest.raises(PlanError):
            search(config, arch)
        return
    found = search(config, arch)
    assert {split_of_choice(choice): (choice.train_s, choice.generate_s) for choice in found.choices} == every
    assert found.choices[0].step_s == min(max(times) for times in every.values())


def split_of_choice(choice: Choice) -> tuple[int, int, int]:
    return choice.train_gpus, choice.rollout_gpus, choice.train_tp_size


@given(case=CASES)
@settings(max_examples=100, deadline=None)
def test_every_gpu_is_used_and_the_job_can_be_written(case: dict[str, Any]) -> None:
    config = configured(**GRP, **case)
    try:
        plan = make_plan(config, QWEN2_5_1_5B)
    except PlanError:
        return

    assert plan.train.gpus + plan.rollout.gpus == config.train_gpus + config.rollout_gpus
    assert plan.train.tp * plan.train.dp == plan.train.gpus
    assert sum(instance.tp for instance in plan.rollout.instances) == plan.rollout.gpus
    if config.launch.mode == "slurm":
        components = job_spec(adopt(config, plan), plan, Path("/runs/x")).components
        assert sum(c.nodes * c.gpus_per_node for c in components) >= plan.train.gpus + plan.rollout.gpus


@given(
    case=CASES,
    arch=st.sampled_from([QWEN2_5_1_5B, QWEN2_5_7B, QWEN3_14B, QWEN3_30B_A3B]),
    share=st.sampled_from([0.05, 0.3, 0.9]),
    strategy=st.sampled_from(["grp", "configured"]),
)
@settings(max_examples=100, deadline=None)
def test_whatever_is_planned_fits_on_both_sides_and_its_terms_add_up(
    case: dict[str, Any], arch: Architecture, share: float, strategy: str
) -> None:
    config = configured(
        **{**case, "initial_allocation_strategy": strategy, "rollout": {"gpu_memory_utilization": share}}
    )
    try:
        plan = make_plan(config, arch)
    except PlanError:
        return

    for terms in plan.memory_bytes.values():
        assert terms["total"] == pytest.approx(sum(terms.values()) - terms["total"] - terms.get("budget", 0.0))
        assert terms["total"] <= terms.get("budget", math.inf)


@given(case=CASES)
@settings(max_examples=50, deadline=None)
def test_a_plan_that_was_adopted_is_planned_again(case: dict[str, Any]) -> None:
    """config.yaml of a run holds the adopted division and the strategy."""
    config = configured(**GRP, **case)
    try:
        plan = make_plan(config, QWEN2_5_1_5B)
    except PlanError:
        return

    assert make_plan(adopt(config, plan), QWEN2_5_1_5B) == plan


@given(case=CASES)
@settings(max_examples=50, deadline=None)
def test_what_was_given_does_not_matter_but_the_sum(case: dict[str, Any]) -> None:
    config = configured(**GRP, **case)
    other = replace(config, train_gpus=config.rollout_gpus, rollout_gpus=config.train_gpus, train_tp_size=7)
    try:
        plan = make_plan(config, QWEN2_5_1_5B)
    except PlanError:
        with pytest.raises(PlanError):
            make_plan(other, QWEN2_5_1_5B)
        return

    assert make_plan(other, QWEN2_5_1_5B) == plan


@pytest.mark.exercises("global_resource_planner.initial_allocation_strategy")
def test_grp_moves_gpus_to_the_side_that_needs_them() -> None:
    """Long answers are bound by generation, short answers to long prompts by training."""
    long = divide(train_gpus=16, rollout_gpus=16, max_model_len=16384, max_new_tokens=16000, batch_size=512)
    short = divide(train_gpus=16, rollout_gpus=16, max_model_len=4096, max_new_tokens=64, batch_size=2048)

    assert long.rollout.gpus > short.rollout.gpus
    assert long.strategy == short.strategy == "grp"


@pytest.mark.exercises("global_resource_planner.initial_allocation_strategy")
def test_configured_keeps_what_was_asked_for_as_the_same_object() -> None:
    config = configured(**(NODE | {"rollout_gpus": 24, "train_tp_size": 4}))

    plan = make_plan(config, QWEN2_5_7B)

    assert split_of(plan) == (8, 24, 4)
    assert adopt(config, plan) is config


def test_adopting_changes_the_division_and_nothing_else() -> None:
    config = configured(**GRP, **(NODE | {"rollout_gpus": 24, "train_tp_size": 7}))

    plan = make_plan(config, QWEN2_5_7B)
    adopted = adopt(config, plan)

    assert (adopted.train_gpus, adopted.rollout_gpus, adopted.train_tp_size) == split_of(plan)
    assert replace(adopted, train_gpus=8, rollout_gpus=24, train_tp_size=7) == config


@pytest.mark.exercises("global_resource_planner.allocation_granularity_gpus")
@pytest.mark.parametrize("step", [8, 16, 24])
def test_the_training_side_is_a_multiple_of_the_granularity(step: int) -> None:
    plan = divide(train_gpus=24, rollout_gpus=40, allocation_granularity_gpus=step)

    assert plan.train.gpus % step == 0


@pytest.mark.exercises("global_resource_planner.allocation_granularity_gpus")
def test_a_given_training_side_between_two_units_is_refused_with_both() -> None:
    with pytest.raises(PlanError, match=r"train_gpus=24 is not a multiple of .*=16; set train_gpus to 16 or 32"):
        make_plan(configured(**(NODE | {"train_gpus": 24, "allocation_granularity_gpus": 16})), QWEN2_5_7B)


@pytest.mark.exercises("global_resource_planner.min_train_gpus")
def test_the_training_side_is_never_below_its_floor() -> None:
    free = divide(train_gpus=16, rollout_gpus=48)
    floor = free.train.gpus + 8

    assert divide(train_gpus=16, rollout_gpus=48, min_train_gpus=floor).train.gpus >= floor


@pytest.mark.exercises("global_resource_planner.min_rollout_gpus")
def test_the_rollout_side_is_never_below_its_floor() -> None:
    free = divide(train_gpus=16, rollout_gpus=48)
    floor = free.rollout.gpus + 8

    assert divide(train_gpus=16, rollout_gpus=48, min_rollout_gpus=floor).rollout.gpus >= floor


@pytest.mark.parametrize("side", ["train", "rollout"])
def test_a_given_side_below_its_floor_is_refused(side: str) -> None:
    with pytest.raises(PlanError, match=rf"{side}_gpus=8 is below global_resource_planner\.min_{side}_gpus=16"):
        make_plan(configured(**(NODE | {f"min_{side}_gpus": 16})), QWEN2_5_7B)


@pytest.mark.exercises("global_resource_planner.allowed_train_tp")
@pytest.mark.parametrize("allowed", [[4], [1, 4], [4, 7]])
def test_only_allowed_tensor_parallel_sizes_are_chosen(allowed: list[int]) -> None:
    plan = divide(train_gpus=16, rollout_gpus=16, allowed_train_tp=allowed)

    assert plan.train.tp == 4
    assert {choice.train_tp_size for choice in plan.runners_up} <= set(allowed)


@pytest.mark.exercises("global_resource_planner.allowed_train_tp")
def test_a_given_tensor_parallel_size_that_is_not_allowed_is_refused_naming_both() -> None:
    with pytest.raises(PlanError, match=r"train_tp_size=4 is not in .*allowed_train_tp=\[1, 2\]; change one of them"):
        make_plan(configured(**(NODE | {"train_tp_size": 4, "allowed_train_tp": [1, 2]})), QWEN2_5_7B)


@pytest.mark.exercises("global_resource_planner.train_comm_compute_ratio_threshold")
def test_a_tensor_parallel_size_above_the_threshold_is_pruned_with_ratio_and_threshold() -> None:
    ratio = communication_compute_ratio(configured(**(NODE | {"train_tp_size": 4})), QWEN2_5_7B)

    plan = divide(allowed_train_tp=[2, 4], train_comm_compute_ratio_threshold=ratio * 0.999)

    [cut] = [cut for cut in plan.rejected if cut.branch == "train_tp_size=4"]
    assert f"ratio of {ratio:.4g}" in cut.reason
    assert f"threshold={ratio * 0.999:g}" in cut.reason
    assert all(choice.train_tp_size == 2 for choice in plan.runners_up)


@pytest.mark.exercises("global_resource_planner.train_comm_compute_ratio_threshold")
def test_a_ratio_that_equals_the_threshold_is_kept() -> None:
    ratio = communication_compute_ratio(configured(**(NODE | {"train_tp_size": 4})), QWEN2_5_7B)

    plan = divide(allowed_train_tp=[4], train_comm_compute_ratio_threshold=ratio)

    assert plan.train.tp == 4


@pytest.mark.exercises("global_resource_planner.train_comm_compute_ratio_threshold")
def test_a_given_tensor_parallel_size_above_the_threshold_is_refused_naming_both() -> None:
    config = configured(**(NODE | {"train_tp_size": 4, "train_comm_compute_ratio_threshold": 0.1}))

    with pytest.raises(PlanError, match=r"train_tp_size=4 .*ratio_threshold=0\.1; lower train_tp_size or raise"):
        make_plan(config, QWEN2_5_7B)


def test_a_sum_that_cannot_be_divided_says_why_and_what_counts() -> None:
    with pytest.raises(PlanError, match=r"train_gpus \+ rollout_gpus = 17 GPUs cannot be divided.*(\n.*)*whole nodes"):
        divide(train_gpus=16, rollout_gpus=1, slurm={"layout": "single"})


def test_a_model_that_fits_nowhere_says_what_it_wants() -> None:
    with pytest.raises(PlanError, match=r"cannot be divided(.*\n)+.*train_gpus=1\.\.7: training wants .* GB"):
        divide(QWEN3_14B, launch={"mode": "local"}, train_gpus=4, rollout_gpus=4, vllm_tp_size=1)


def test_a_batch_smaller_than_the_replicas_rules_a_size_out() -> None:
    plan = divide(QWEN2_5_1_5B, train_gpus=8, rollout_gpus=8, batch_size=4, n_samples=4)

    assert plan.train.dp <= 4


def test_a_thousand_gpus_take_one_look_at_each_division() -> None:
    """127 whole-node divisions, and of the usual four sizes 1 is too small for memory and 8 does not divide 28 heads."""
    config = configured(
        **GRP, **(NODE | {"train_gpus": 512, "rollout_gpus": 512, "batch_size": 4096, "max_concurrent_rollouts": 8192})
    )

    found = search(config, QWEN2_5_7B)

    assert found.evaluated == len(found.choices) == 2 * 127
    assert len(found.rejected) < 10


def test_every_division_is_either_a_choice_or_rejected_with_a_reason() -> None:
    config = configured(**GRP, **(NODE | {"train_gpus": 16, "rollout_gpus": 16, "allowed_train_tp": [1, 2, 4]}))

    found = search(config, QWEN2_5_7B)

    chosen = {(choice.train_gpus, choice.train_tp_size) for choice in found.choices}
    cut = {(size, tp) for size, tp in product(range(1, 32), (1, 2, 4)) if is_cut(size, tp, found.rejected)}
    assert chosen | cut == set(product(range(1, 32), (1, 2, 4)))
    assert not chosen & cut


def is_cut(size: int, tp: int, rejected: Any) -> bool:
    """Reads the branches of the rejections as a person does."""
    for cut in rejected:
        if "train_tp_size=" in cut.branch and f"train_tp_size={tp}" not in cut.branch:
            continue
        sizes = cut.branch.partition("train_gpus=")[2]
        if not sizes or any(size in spelled(part) for part in sizes.split(", ")):
            return True
    return False


def spelled(run: str) -> range:
    numbers, _, step = run.partition(" by ")
    first, _, last = numbers.partition("..")
    return range(int(first), int(last or first) + 1, int(step or 1))


@given(numbers=st.sets(st.integers(1, 60)).map(sorted))
def test_runs_of_numbers_read_back(numbers: list[int]) -> None:
    text = runs(numbers)

    assert [number for part in text.split(", ") if part for number in spelled(part)] == numbers


def test_runs_are_short() -> None:
    assert runs([1, 2, 3, 4, 5, 6, 7, 9, 10, 11]) == "1..7, 9..11"
    assert runs([8, 16, 24, 32]) == "8..32 by 8"


def test_equal_step_times_go_to_the_faster_other_side_then_to_rollout_then_to_less_tensor_parallelism() -> None:
    slow_train = Choice(8, 24, 2, train_s=9.0, generate_s=10.0)
    quick_train = Choice(16, 16, 2, train_s=5.0, generate_s=10.0)
    more_rollout = Choice(8, 24, 2, train_s=5.0, generate_s=10.0)
    less_tp = Choice(8, 24, 1, train_s=5.0, generate_s=10.0)

    ordered = sorted([slow_train, quick_train, more_rollout, less_tp], key=lambda choice: choice.rank)

    assert ordered == [less_tp, more_rollout, quick_train, slow_train]


def test_the_description_of_a_searched_plan_names_the_best_others_and_what_was_cut() -> None:
    plan = divide(train_gpus=16, rollout_gpus=16)

    text = describe(plan)

    assert f"division   grp: the best of {plan.evaluated} ways to divide 32 GPUs that fit" in text
    assert text.count("next best  train_gpus=") == len(plan.runners_up) > 0
    assert "rejected   train_gpus=9..15, 17..23, 25..31: train_gpus=9 does not fill whole nodes" in text
    assert [choice.step_s for choice in plan.runners_up] == sorted(choice.step_s for choice in plan.runners_up)
