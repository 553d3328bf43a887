"""Every experiment of the tree composes, is valid, is planned and renders the job script that is stored for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import conf
from conf.pending import PLANNED_ONLY, pending_problems
from conf.schema import LibraConfig
from launch import pipeline
from launch.compose import groups
from launch.errors import ConfigError
from launch.prepare import Prepared, check_machine, prepare
from planner.placement import MAX_ROLLOUT_COMPONENTS

EXPERIMENTS = groups()["experiment"]
FIXED = ("launch.run_dir=/runs/golden", "launch.python=/venv/bin/python", "launch.cache_dir=/cache")
"""What differs between machines."""

USUAL = {"demo", "grpo_7b", "dapo_7b", "grpo_moe_30b_a3b", "elastic_14b", "smollm2_135m"}


def prepared(experiment: str, *overrides: str) -> Prepared:
    mode = "local" if experiment == "demo" else "slurm"
    return prepare([f"+experiment={experiment}", f"launch.mode={mode}", "launch.dry_run=true", *FIXED, *overrides])


def test_the_experiments_that_people_look_for_are_there() -> None:
    assert set(EXPERIMENTS) >= USUAL


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_renders_the_stored_plan_and_script(experiment: str, golden: Callable[[str, str], None]) -> None:
    golden(f"dry_run/{experiment}.txt", pipeline.dry_run_text(prepared(experiment)))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_sets_nothing_that_is_not_built(experiment: str) -> None:
    assert list(pending_problems(prepared(experiment).config)) == []


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_leaves_nothing_doubtful(experiment: str) -> None:
    assert prepared(experiment).notes == []


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_keeps_a_tenth_of_the_memory_free(experiment: str) -> None:
    """Beyond what the planner takes off already: its estimate is an estimate."""
    for side, terms in prepared(experiment).plan.memory_bytes.items():
        assert terms["total"] < 0.95 * terms.get("budget", float("inf")), side


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name != "demo"])
def test_both_sides_of_an_experiment_take_like_times(experiment: str) -> None:
    """A side that waits for more than half of the time would be a waste of somebody's allocation."""
    times = prepared(experiment).plan.predicted

    assert 0.4 < times["train_s"] / times["generate_s"] < 2.0


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_waits_of_an_experiment_allow_for_twice_the_expected_time(experiment: str) -> None:
    run = prepared(experiment)
    config, times = run.config, run.plan.predicted
    collect_s = config.global_resource_planner.runtime_batch_collection_timeout_s

    assert config.algorithm.step_timeout_s > 2 * times["train_s"]
    assert collect_s > 2 * times["generate_s"]
    assert config.rollout.request_timeout_s > 2 * times["generate_s"]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_ends_before_its_time_limit(experiment: str) -> None:
    """As expected, with every answer at its longest and both sides in turn; setting up and evaluating take the rest."""
    run = prepared(experiment)
    steps_s = run.config.total_steps * (run.plan.predicted["train_s"] + run.plan.predicted["generate_s"])

    assert steps_s < 0.9 * 60 * run.config.slurm.time_min


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_needs_few_components(experiment: str) -> None:
    components = {placed.component for placed in prepared(experiment).plan.rollout.instances}

    assert len(components) <= MAX_ROLLOUT_COMPONENTS


def test_the_planner_divides_the_elastic_experiment_in_whole_nodes() -> None:
    run = prepared("elastic_14b")

    assert run.plan.strategy == "grp"
    assert run.config.train_gpus % 8 == 0
    assert run.config.train_gpus + run.config.rollout_gpus == 48
    assert run.sources["train_gpus"] == "planner"


def test_a_mixture_is_planned_and_its_start_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    run = prepared("grpo_moe_30b_a3b", f"launch.run_dir={tmp_path}/run")

    assert "cannot start yet: " in pipeline.dry_run_text(run)
    with pytest.raises(ConfigError, match="mixture-of-experts models is not built yet"):
        check_machine(run)
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_planned_only_says_that_it_cannot_start() -> None:
    refused = [name for name in EXPERIMENTS if "cannot start yet" in pipeline.dry_run_text(prepared(name))]

    assert refused == [name for name in EXPERIMENTS if prepared(name).architecture.name in PLANNED_ONLY]


def test_an_experiment_of_the_tree_can_be_changed_on_the_command_line() -> None:
    config: LibraConfig = prepared("dapo_7b", "algorithm.clip_high=0.3", "train_gpus=32", "hardware=h200_141g").config

    assert (config.algorithm.clip_high, config.algorithm.drop_uniform_groups) == (0.3, True)
    assert (config.train_gpus, config.hardware.gpu_memory_bytes) == (32, 141e9)


def test_files_of_the_tree_name_no_path_of_a_machine() -> None:
    texts = [file.read_text() for file in Path(conf.__file__).parent.glob("*/*.yaml")]

    assert not [text for text in texts if "/home" in text or "model_path: /" in text]
