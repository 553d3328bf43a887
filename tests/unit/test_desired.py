"""The desired state as a record."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.desired_steps import desired_steps
from stages.desired import DesiredState, DesiredStateError, end_run, read_desired, write_desired
from stages.rundir import RunDir
from tests.fake_runs import fake_config, fake_plan

STATE = desired_steps(fake_config(), fake_plan(train_gpus=2))


def test_a_desired_state_survives_its_record(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")

    write_desired(run, STATE)

    assert read_desired(run) == STATE


def test_ending_the_run_keeps_the_steps(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    write_desired(run, STATE)

    end_run(run, "success", "all steps are trained")

    assert read_desired(run) == DesiredState("stop", STATE.steps, "success", "all steps are trained")


def test_ending_a_run_without_a_desired_state_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DesiredStateError, match="holds no desired state of attempt 0"):
        end_run(RunDir.create(tmp_path / "run"), "success")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"phase": "pause"}, "phase is 'pause'"),
        ({"phase": "stop"}, "stop needs one of"),
        ({"outcome": "success"}, "run none"),
        ({"steps": [{"name": "trainer"}]}, "incomplete"),
        ({"steps": None}, "incomplete"),
    ],
)
def test_a_record_that_cannot_be_done_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(DesiredStateError, match=message):
        DesiredState.from_dict({**STATE.to_dict(), **change})


def test_two_steps_of_one_name_are_refused() -> None:
    with pytest.raises(DesiredStateError, match="not unique"):
        DesiredState("run", (STATE.steps[0], STATE.steps[0]))


def test_only_rollout_runs_until_it_is_asked_to_stop() -> None:
    assert [step.name for step in STATE.steps if step.is_service] == ["rollout_000", "rollout_001"]
