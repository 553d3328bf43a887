"""After a run: what was set and read by nobody."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.schema import LibraConfig
from conf.sections import WarmupConfig
from launch.unread import warning
from stages.desired import DesiredState, StepSpec, write_desired
from stages.rundir import RunDir

SET = {"seed": "command line"}


def step(name: str, tasks: int = 1) -> StepSpec:
    role = name.partition("_")[0]
    return StepSpec(name, role, 0, 0, 1, tasks, tasks, 1, 0)


def finished_run(root: Path, config: LibraConfig, reads: dict[tuple[str, int], Iterable[str]]) -> RunDir:
    """A run of two trainer ranks, one instance and the controller; `reads` are the records that were left."""
    run = RunDir.create(root)
    run.config_yaml.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    write_desired(run, DesiredState("run", (step("trainer", 2), step("rollout_000"), step("controller"))))
    for (name, rank), options in reads.items():
        run.write(run.reads_json(name, rank), {"options": sorted(options)})
    return run


def all_tasks(options: Iterable[str] = ()) -> dict[tuple[str, int], Iterable[str]]:
    return {("trainer", 0): options, ("trainer", 1): [], ("rollout_000", 0): [], ("controller", 0): []}


def test_an_option_that_was_set_and_read_by_nobody_is_named_with_its_source(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", LibraConfig(seed=3), all_tasks())

    assert warning(run, SET, own_reads=()).splitlines() == [
        "warning: nothing in this run has read these options, so they had no effect:",
        "  seed=3 (command line)",
    ]


@pytest.mark.parametrize(
    "source", ["command line", "environment RL_TRAIN_PHASE_TRACE", "/home/me/mine.yaml", "conf/mine.yaml"]
)
def test_whatever_a_user_set_counts(tmp_path: Path, source: str) -> None:
    run = finished_run(tmp_path / "run", LibraConfig(seed=3), all_tasks())

    assert f"seed=3 ({source})" in warning(run, {"seed": source}, own_reads=())


@pytest.mark.parametrize("source", ["default", "launcher", "planner", "conf/experiment/demo.yaml"])
def test_what_no_user_set_does_not(tmp_path: Path, source: str) -> None:
    run = finished_run(tmp_path / "run", LibraConfig(seed=3), all_tasks())

    assert warning(run, {"seed": source}, own_reads=()) == ""


def test_what_the_configuration_of_an_earlier_run_holds_does_not(tmp_path: Path) -> None:
    earlier = finished_run(tmp_path / "earlier", LibraConfig(seed=3), {})
    run = finished_run(tmp_path / "run", LibraConfig(seed=3), all_tasks())

    assert warning(run, {"seed": str(earlier.config_yaml)}, own_reads=()) == ""


def test_one_rank_that_reads_it_is_enough(tmp_path: Path) -> None:
    reads = {**all_tasks(), ("trainer", 1): ["seed"]}
    run = finished_run(tmp_path / "run", LibraConfig(seed=3), reads)

    assert warning(run, SET, own_reads=()) == ""


def test_what_the_launcher_read_is_read(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", LibraConfig(seed=3), all_tasks())

    assert warning(run, SET, own_reads={"seed"}) == ""


def test_an_option_set_to_its_default_is_no_matter(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", LibraConfig(), all_tasks())

    assert warning(run, SET, own_reads=()) == ""


def test_nothing_is_said_about_what_a_task_without_a_record_may_have_read(tmp_path: Path) -> None:
    reads = all_tasks()
    del reads["controller", 0]
    config = replace(LibraConfig(seed=3), warmup=replace(LibraConfig().warmup, batch_size=3))
    run = finished_run(tmp_path / "run", config, reads)

    text = warning(run, {**SET, "warmup.batch_size": "command line"}, own_reads=())

    assert "seed" not in text, "the controller's code reads it"
    assert "warmup.batch_size=3" in text, "only the warm-up's code reads it"


def test_what_a_warm_up_reads_counts_also_when_its_policy_was_in_the_cache(tmp_path: Path) -> None:
    config = LibraConfig(warmup=WarmupConfig(steps=3, batch_size=5))
    config.launch.cache_dir = "/scratch/policies"
    run = finished_run(tmp_path / "run", config, all_tasks())
    names = ("warmup.steps", "warmup.batch_size", "launch.cache_dir")

    assert warning(run, dict.fromkeys(names, "command line"), own_reads=()) == ""


def test_the_deprecated_option_is_not_named_again(tmp_path: Path) -> None:
    config = LibraConfig()
    config.global_resource_planner.elastic_hybrid_max_workers = 4
    run = finished_run(tmp_path / "run", config, all_tasks())

    assert warning(run, {"global_resource_planner.elastic_hybrid_max_workers": "command line"}, own_reads=()) == ""


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("slurm.partition", "gpu", "it counts only in a Slurm job (launch.mode=slurm), and this run was local"),
        ("warmup.batch_size", 9, "warmup.steps=0 leaves the warm-up out"),
        ("launch.cache_dir", "/scratch/policies", "warmup.steps=0 leaves the warm-up out"),
        ("model.hidden_size", 64, "the model is read from config.json in model_path"),
        ("rollout.kv_cache_bytes", 1e9, "it counts only on hardware.device=cpu"),
    ],
)
def test_an_obvious_reason_is_given(tmp_path: Path, name: str, value: object, hint: str) -> None:
    config = LibraConfig()
    config.launch.mode = "local"
    group, leaf = name.split(".")
    setattr(getattr(config, group), leaf, value)
    run = finished_run(tmp_path / "run", config, all_tasks())

    assert warning(run, {name: "command line"}, own_reads=()).endswith(f"(command line): {hint}")
