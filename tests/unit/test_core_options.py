"""Core options of the reference whose effect is a plan, a job or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import pipeline
from launch.compose import compose
from launch.desired_steps import desired_steps
from planner.model import from_model_config
from planner.plan import Plan
from planner.search import make_plan
from planner.validate import problems
from stages.desired import StepSpec


def planned(*overrides: str) -> tuple[Plan, dict[str, StepSpec]]:
    config = compose(["+experiment=grpo_7b", "launch.mode=slurm", *overrides])
    plan = make_plan(config, from_model_config(config.model))
    return plan, {step.name: step for step in desired_steps(config, plan).steps}


@pytest.mark.exercises("train_gpus")
@pytest.mark.parametrize("gpus", [8, 16, 32])
def test_as_many_trainer_ranks_start_as_gpus_are_asked_for(gpus: int) -> None:
    plan, steps = planned(f"train_gpus={gpus}")

    assert plan.train.gpus == gpus
    assert (steps["trainer"].tasks, steps["trainer"].nodes) == (gpus, gpus // 8)


@pytest.mark.exercises("rollout_gpus")
@pytest.mark.parametrize(("gpus", "tp"), [(8, 1), (16, 2), (24, 4)])
def test_as_many_instances_start_as_the_rollout_gpus_hold(gpus: int, tp: int) -> None:
    _, steps = planned(f"rollout_gpus={gpus}", f"vllm_tp_size={tp}")

    rollouts = [step for step in steps.values() if step.role == "rollout"]
    assert len(rollouts) == gpus // tp
    assert {step.gpus_per_node for step in rollouts} == {tp}


@pytest.mark.exercises("train_tp_size")
@pytest.mark.parametrize("tp", [2, 4])
def test_trainer_ranks_are_divided_into_tensor_parallel_groups(tp: int) -> None:
    plan, _ = planned("train_gpus=16", f"train_tp_size={tp}")

    assert (plan.train.tp, plan.train.dp) == (tp, 16 // tp)


@pytest.mark.exercises("train_backend", "rollout_weight_sync_mode")
@pytest.mark.parametrize(("given", "wanted"), [
    ("train_backend=fsdp", "train_backend='fsdp' is not one of 'megatron_core'"),
    ("rollout_weight_sync_mode=none", "rollout_weight_sync_mode='none' is not one of 'restart'"),
])  # fmt: skip
def test_what_has_one_way_takes_no_other(given: str, wanted: str) -> None:
    assert any(problem.startswith(wanted) for problem in problems(compose([given])))


@pytest.mark.exercises("global_resource_planner.elastic_hybrid_max_workers")
def test_the_deprecated_number_of_workers_is_accepted_ignored_and_warned_about_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["+experiment=demo", "launch.dry_run=true", f"launch.run_dir={tmp_path / 'run'}"]
    pipeline.launch(given)
    without = capsys.readouterr()

    pipeline.launch([*given, "global_resource_planner.elastic_hybrid_max_workers=4"])

    warned = capsys.readouterr()
    assert warned.out == without.out
    assert without.err.count("elastic_hybrid_max_workers") == 0
    assert warned.err.count("elastic_hybrid_max_workers=4 is deprecated and ignored") == 1
