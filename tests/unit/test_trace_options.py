"""Stages trace as their run's config.yaml says, whatever their own environment says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.schema import LibraConfig
from planner.plan import Plan, RolloutLayout, TrainLayout
from stages.context import open_context
from stages.files import list_names
from stages.rundir import RunDir


@pytest.mark.parametrize("enabled", [True, False])
def test_a_stage_does_not_look_at_the_variables_that_the_launcher_settles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    run = RunDir.create(tmp_path / "run")
    OmegaConf.save(OmegaConf.create(asdict(LibraConfig(phase_trace_enabled=enabled))), run.config_yaml)
    layouts = TrainLayout(1, 1, 1, 1, 1, 1, 1, 1), RolloutLayout(1, 1, 1, ())
    run.write(run.plan_json, Plan("single", "test", "cpu", *layouts).to_dict())
    monkeypatch.setenv("RL_TRAIN_PHASE_TRACE", "0" if enabled else "1")
    monkeypatch.setenv("RL_TRAIN_PHASE_TRACE_DIR", str(tmp_path / "elsewhere"))

    with open_context("trainer", run.root, name="trainer") as context, context.recorder.span("step"):
        pass

    assert list_names(run.traces) == (["phase_trace_rank0000.trainer.jsonl"] if enabled else [])
    assert not (tmp_path / "elsewhere").exists()
