"""What a stage is given, and what it leaves alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.schema import LibraConfig
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.context import StoppedError, open_context
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


@pytest.mark.exercises("phase_trace_enabled")
@pytest.mark.parametrize("enabled", [True, False])
def test_spans_are_written_only_where_the_run_asks_for_them(run: RunDir, enabled: bool) -> None:
    OmegaConf.save(OmegaConf.create(asdict(LibraConfig(phase_trace_enabled=enabled))), run.config_yaml)

    assert record_a_span(run, alone=False) == (["phase_trace_rank0000.rollout_000.jsonl"] if enabled else [])


def test_a_trace_goes_to_the_directory_that_the_run_names(run: RunDir, tmp_path: Path) -> None:
    config = LibraConfig()
    config.trace.directory = str(tmp_path / "spans")
    OmegaConf.save(OmegaConf.create(asdict(config)), run.config_yaml)

    assert record_a_span(run, alone=False) == []
    assert list_names(tmp_path / "spans") == ["phase_trace_rank0000.rollout_000.jsonl"]


def test_a_stage_started_by_hand_leaves_the_trace_of_a_finished_run_alone(run: RunDir) -> None:
    run.write(run.summary_json, {"steps": 1})

    assert record_a_span(run, alone=True) == []


def options_read(run: RunDir, *, name: str = "rollout_000", rank: int = 0) -> set[str] | None:
    record = run.read(run.reads_json(name, rank))
    return None if record is None else set(record["options"])


def test_a_stage_leaves_the_names_of_the_options_that_it_read(run: RunDir) -> None:
    with open_context("trainer", run.root, name="trainer", rank=1, world_size=2) as context:
        assert context.config.algorithm.clip_low == 0.2

    read = options_read(run, name="trainer", rank=1)
    assert read is not None
    assert "phase_trace_enabled" in read, "opening the context reads this one"
    assert "learning_rate" not in read
    # A test's own reads count as well, as those of any module that uses options.
    assert "algorithm.clip_low" in read


def test_a_stage_that_was_stopped_leaves_them_too(run: RunDir) -> None:
    def stage() -> None:
        with open_context("rollout", run.root, name="rollout_000") as context:
            context.stop.set()
            context.check_stop()

    with pytest.raises(StoppedError):
        stage()

    assert options_read(run)


def test_a_stage_started_by_hand_leaves_none(run: RunDir) -> None:
    record_a_span(run, alone=True)

    assert options_read(run) is None


def test_a_stage_of_an_attempt_that_is_over_ends_as_it_would_have(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_context("rollout", run.root, name="rollout_000"):
        run.start_attempt(1)

    assert "rollout_000 rank 0: which options it read is not recorded" in capsys.readouterr().err
    assert options_read(run) is None
