"""Following a run: progress, the end, a death without last words."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from launch.display import PlainDisplay
from launch.errors import RunFailedError
from launch.follow import final_words, follow
from launch.metrics import JsonLines, duration, step_line
from stages.rundir import RunDir

STEP = {
    "step": 0,
    "total_steps": 10,
    "reward": 0.5,
    "tokens_per_s": 1234.5,
    "staleness_mean": 0.25,
    "staleness_max": 1,
    "version": 1,
    "sync_s": 0.07,
    "step_s": 0.6,
    "eta_s": 65.0,
}


class ScriptedSubmission:
    mode = "slurm"
    job_id = "42"

    def __init__(self, *answers: tuple[str, str]) -> None:
        self._answers = list(answers)

    def poll(self) -> tuple[str, str]:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def cancel(self) -> None:
        raise AssertionError("nobody asked")


class Clock:
    """Moves only when the follower sleeps, and runs a script of side effects."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *events: Any) -> None:
        self.now_s = 100.0
        self._events = list(events)
        monkeypatch.setattr("launch.follow.time.monotonic", lambda: self.now_s)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self._events:
            self._events.pop(0)()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def test_steps_are_shown_and_success_ends_the_wait(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    run.metrics_jsonl.write_text(json.dumps(STEP) + "\n")
    clock = Clock(monkeypatch, lambda: run.write(run.state_json, {"phase": "succeeded", "steps": {}}))

    follow(run, ScriptedSubmission(("pending", "Resources"), ("running", "")), PlainDisplay(out), clock.sleep)

    assert "job 42 is pending: Resources" in out.getvalue()
    assert "reward 0.500" in out.getvalue()


def test_a_failure_says_cause_log_and_exit_code(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    cause = {"step": "trainer", "message": "killed by SIGKILL", "exit_code": 137, "log_tail": "last words"}
    run.write(run.state_json, {"phase": "failed", "steps": {}, "cause": cause})

    with pytest.raises(RunFailedError) as caught:
        follow(run, ScriptedSubmission(("running", "")), PlainDisplay(io.StringIO()), Clock(monkeypatch).sleep)

    assert caught.value.exit_code == 137
    assert "trainer: killed by SIGKILL" in str(caught.value)
    assert "last words" in str(caught.value)


def test_a_supervisor_that_vanished_is_noticed_within_fifteen_seconds(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    run.write(run.state_json, {"phase": "running", "steps": {}})

    with pytest.raises(RunFailedError, match="without a final state"):
        follow(run, ScriptedSubmission(("failed", "NODE_FAIL")), PlainDisplay(io.StringIO()), clock.sleep)

    assert clock.now_s - 100.0 < 15


def test_an_unknown_queue_state_is_not_an_end(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [lambda: None] * 100 + [lambda: run.write(run.state_json, {"phase": "succeeded", "steps": {}})]
    clock = Clock(monkeypatch, *events)

    follow(run, ScriptedSubmission(("unknown", "")), PlainDisplay(io.StringIO()), clock.sleep)

    assert clock.now_s > 120


def test_a_half_written_metrics_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    path.write_text('{"step": 1}\n{"st')

    first = list(lines.new())
    path.write_text('{"step": 1}\n{"step": 2}\n')

    assert (first, list(lines.new())) == ([{"step": 1}], [{"step": 2}])


def test_a_step_line_names_every_column() -> None:
    line = step_line(STEP)

    for word in ("step 1/10", "reward", "tokens/s 1,23", "staleness 0.25", "version v1", "sync s 0.070", "ETA 1:05"):
        assert word in line


def test_final_words_hold_reward_checkpoint_and_trace_command(run: RunDir) -> None:
    summary = {
        "reward_before": 0.5,
        "reward_after": 0.9,
        "sampled_before": 0.4,
        "sampled_after": 0.8,
        "steps": 300,
        "wall_s": 200.0,
        "phase_s": {"generate": 1.0},
        "weight_refresh_s": [9.0, 0.1, 0.3, 0.2],
        "checkpoint": "/x/weights/v000300",
        "attempts": 1,
    }
    run.summary_json.write_text(json.dumps(summary))

    text = final_words(run)

    for word in (
        "0.500   0.900",
        "0.400   0.800",
        "/x/weights/v000300",
        "median 0.200 s",
        f"make trace RUN={run.root}",
    ):
        assert word in text


def test_durations_read_as_clocks() -> None:
    assert [duration(5), duration(65), duration(3661)] == ["0:05", "1:05", "1:01:01"]
