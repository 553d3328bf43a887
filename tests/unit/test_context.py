"""What a stage is given, and what it leaves alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.schema import LibraConfig
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.context import open_context
from stages.files import list_names
from stages.rundir import RunDir

PLAN = Plan(
    "single",
    "test",
    "cpu",
    TrainLayout(1, 1, 1, 1, 1, 1, 1, 1),
    RolloutLayout(2, 1, 2, (InstancePlacement("rollout_000", 2, 0, 0),)),
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "run")
    OmegaConf.save(OmegaConf.create(asdict(LibraConfig())), run.config_yaml)
    run.write(run.plan_json, PLAN.to_dict())
    return run


def record_a_span(run: RunDir, *, alone: bool) -> list[str]:
    with open_context("rollout", run.root, name="rollout_000", alone=alone) as context:
        with context.recorder.span("start_server"):
            pass
    return list_names(run.traces)


def test_a_stage_of_a_run_records_its_trace(run: RunDir) -> None:
    assert record_a_span(run, alone=False) == ["phase_trace_rank0000.rollout_000.jsonl"]


def test_a_stage_started_by_hand_leaves_the_trace_of_a_finished_run_alone(run: RunDir) -> None:
    run.write(run.summary_json, {"steps": 1})

    assert record_a_span(run, alone=True) == []
