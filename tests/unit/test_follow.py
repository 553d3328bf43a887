"""Following a run: queue, progress, restarts, further attempts, the end, a death without last words."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from launch import follow as following
from launch.display import PlainDisplay
from launch.errors import RunFailedError
from launch.follow import final_words, follow, main
from launch.life import Sign
from launch.metrics import JsonLines, duration, step_line
from stages.rundir import RunDir
from tests.fake_slurm import FakeSlurm, Job, short_looks, slurm_in_memory
from tests.made_runs import CAUSE, STEP, another_attempt, made, says, trained

__all__ = ["short_looks", "slurm_in_memory"]
pytestmark = pytest.mark.usefixtures("slurm_in_memory", "short_looks")

LINE = STEP | {"step": 0, "version": 1}


class Scripted:
    """Gives the same signs one after the other, and the last one for ever."""

    def __init__(self, *signs: Sign) -> None:
        self._signs = list(signs) or [Sign("running")]

    def look(self, run: RunDir, state: Mapping[str, Any]) -> Sign:
        return self._signs.pop(0) if len(self._signs) > 1 else self._signs[0]


class Clock:
    """Moves only when the follower sleeps, and runs a script of side effects."""

    def __init__(self, *events: Callable[[], object]) -> None:
        self.now_s = 100.0
        self._events = list(events)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self._events:
            self._events.pop(0)()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return made(tmp_path / "run")


def watched(run: RunDir, clock: Clock, *signs: Sign) -> str:
    """What a terminal that is none shows until the run has succeeded."""
    out = io.StringIO()
    follow(run, Scripted(*signs), PlainDisplay(out), clock.sleep, clock)
    return out.getvalue()


def nothing() -> None:
    return None


# ---- the queue -----------------------------------------------------------------------------------------------------------


def test_what_the_job_waits_for_is_said_when_it_is_news(run: RunDir) -> None:
    clock = Clock(nothing, nothing, nothing, lambda: says(run, "succeeded"))
    pending = Sign("waiting", "job 41 is pending: Resources", is_news=True)
    again = Sign("waiting", "job 41 is pending: Resources, in 59 s")

    shown = watched(run, clock, pending, again, again, Sign("running", "job 41 is running", is_news=True))

    assert shown.splitlines() == ["job 41 is pending: Resources", "job 41 is running"]


# ---- progress ------------------------------------------------------------------------------------------------------------


def test_steps_are_shown_and_success_ends_the_wait(run: RunDir) -> None:
    run.metrics_jsonl.write_text(json.dumps(LINE) + "\n")

    shown = watched(run, Clock(lambda: says(run, "succeeded")))

    assert "reward 0.500" in shown


def test_each_change_of_a_step_is_said_once(run: RunDir) -> None:
    step = {"state": "running", "started": 1.0}
    clock = Clock(
        lambda: says(run, "running", steps={"trainer": step}),
        lambda: says(run, "running", steps={"trainer": step}),
        lambda: says(run, "succeeded", steps={"trainer": step | {"state": "ended"}}),
    )

    assert watched(run, clock).splitlines() == ["trainer: running", "trainer: ended"]


def test_a_restarted_step_is_told_from_its_first_start(run: RunDir) -> None:
    def is_now(**step: Any) -> Callable[[], None]:
        return lambda: says(run, "running", steps={"rollout_001": step})

    clock = Clock(
        is_now(state="running", started=1.0),
        is_now(state="waiting", started=1.0, reason="killed by SIGKILL"),
        is_now(state="running", started=9.0),
        lambda: says(run, "succeeded"),
    )

    assert watched(run, clock).splitlines() == [
        "rollout_001: running",
        "rollout_001: waiting (killed by SIGKILL)",
        "rollout_001: running (start 2)",
    ]


def test_a_half_written_metrics_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    path.write_text('{"step": 1}\n{"st')

    first = list(lines.new())
    path.write_text('{"step": 1}\n{"step": 2}\n')

    assert (first, list(lines.new())) == ([{"step": 1}], [{"step": 2}])


def test_a_step_line_names_every_column() -> None:
    line = step_line(LINE)

    for word in ("step 1/10", "reward", "tokens/s 1,000", "staleness 0.25", "version v1", "sync s 0.070", "ETA 0:08"):
        assert word in line


def test_durations_read_as_clocks() -> None:
    assert [duration(5), duration(65), duration(3661)] == ["0:05", "1:05", "1:01:01"]


# ---- further attempts ----------------------------------------------------------------------------------------------------


def test_a_requeued_run_is_followed_into_its_next_attempt(run: RunDir) -> None:
    def restart() -> None:
        says(another_attempt(run, "requeue", step=4), "succeeded")

    clock = Clock(lambda: says(run, "requeued"), nothing, restart)

    shown = watched(run, clock)

    assert "attempt 0 is over, the run goes on in another" in shown
    assert "attempt 1 (requeue), from step 4" in shown


def test_the_last_words_of_an_attempt_are_said_before_the_next_one(run: RunDir) -> None:
    def both() -> None:
        says(run, "requeued", steps={"trainer": {"state": "ended", "started": 1.0}})
        says(another_attempt(run, "chain"), "succeeded")

    shown = watched(run, Clock(both)).splitlines()

    assert shown.index("trainer: ended") < shown.index("attempt 1 (chain), from step 4")


def test_an_attempt_is_said_once_it_is_known_why_it_is(run: RunDir) -> None:
    later = RunDir(run.root, run.run_id, 1, "supervisor")
    record = {"job_id": "41", "resumed_step": 4, "reason": "requeue", "previous": 0}
    clock = Clock(
        lambda: says(run, "requeued"),
        lambda: run.start_attempt(1),
        nothing,
        lambda: later.write(later.attempt_json, record),
        lambda: says(later, "succeeded"),
    )

    assert watched(run, clock).splitlines()[-1] == "attempt 1 (requeue), from step 4"


def test_the_same_stage_is_said_again_in_another_attempt(run: RunDir) -> None:
    steps = {"trainer": {"state": "running", "started": 1.0}}
    clock = Clock(
        lambda: says(run, "running", steps=steps),
        lambda: says(another_attempt(run), "succeeded", steps={"trainer": {"state": "running", "started": 2.0}}),
    )

    assert watched(run, clock).splitlines().count("trainer: running") == 2


# ---- the end -------------------------------------------------------------------------------------------------------------


def test_a_failure_says_cause_log_and_exit_code(run: RunDir) -> None:
    says(run, "failed", cause=CAUSE)

    with pytest.raises(RunFailedError) as caught:
        watched(run, Clock())

    assert caught.value.exit_code == 137
    for words in ("trainer: rank 1 killed by SIGKILL", "| loss 0.4", "python -m launch.status"):
        assert words in str(caught.value)


def test_a_supervisor_that_vanished_is_noticed_within_fifteen_seconds(run: RunDir, slurm_in_memory: FakeSlurm) -> None:
    clock = Clock()
    says(run, "running")
    (run.logs / "supervisor.log").write_text("slurmstepd: error: node0 is down\n")
    slurm_in_memory.jobs[41] = Job("NODE_FAIL")

    with pytest.raises(RunFailedError) as caught:
        watched(run, clock, Sign("over", "component 0 is NODE_FAIL"))

    assert clock.now_s - 100.0 < 15
    for words in ("NODE_FAIL", "left no last word", "slurmstepd: error: node0 is down"):
        assert words in str(caught.value)


def test_a_last_word_that_comes_after_the_end_of_the_job_counts(run: RunDir) -> None:
    clock = Clock(*[nothing] * 8, lambda: says(run, "succeeded"))

    assert watched(run, clock, Sign("over", "component 0 is COMPLETED")) == ""


def test_a_run_that_was_cancelled_in_the_queue_says_who_did_it(run: RunDir, slurm_in_memory: FakeSlurm) -> None:
    run.write(run.cancel_json, {"checkpoint": False, "by": "ada@login1"})
    slurm_in_memory.jobs[41] = Job("CANCELLED")

    with pytest.raises(RunFailedError, match="cancelled by ada@login1") as caught:
        watched(run, Clock(), Sign("over", "component 0 is CANCELLED"))

    assert caught.value.exit_code == 143


@pytest.mark.parametrize("phase", ["", "running"])
def test_a_run_directory_that_is_taken_away_ends_the_wait(run: RunDir, phase: str) -> None:
    if phase:
        says(run, phase)
    clock = Clock(nothing, lambda: run.root.rename(run.root.with_name("elsewhere")))

    with pytest.raises(RunFailedError, match="the run directory is gone"):
        watched(run, clock, Sign("unknown"))

    assert clock.now_s - 100.0 < 15


def test_an_unknown_queue_state_is_not_an_end(run: RunDir) -> None:
    clock = Clock(*[nothing] * 100, lambda: says(run, "succeeded"))

    watched(run, clock, Sign("unknown"))

    assert clock.now_s > 120


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


# ---- python -m launch.follow ---------------------------------------------------------------------------------------------


def test_attaching_to_a_failed_run_ends_with_its_cause_and_code(run: RunDir) -> None:
    says(run, "failed", cause=CAUSE)

    with pytest.raises(RunFailedError, match="killed by SIGKILL") as caught:
        main([str(run.root)])

    assert caught.value.exit_code == 137


def test_attaching_to_a_finished_run_says_what_it_said(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    says(run, "succeeded")

    assert main([str(run.root)]) == 0
    assert "the run succeeded" in capsys.readouterr().out


def test_attaching_to_a_vanished_run_does_not_wait(run: RunDir, slurm_in_memory: FakeSlurm) -> None:
    says(run, "running")
    slurm_in_memory.jobs[41] = Job("FAILED", exit_code="0:9")

    with pytest.raises(RunFailedError, match="is vanished: job 41 is over"):
        main([str(run.root)])


def test_attaching_to_a_pending_run_shows_the_queue_and_the_whole_run(
    run: RunDir, slurm_in_memory: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real time: two looks."""
    slurm_in_memory.jobs[41] = Job("PENDING", "Resources")
    trained(run, 2)
    monkeypatch.setattr(following, "LOOK_INTERVAL_S", 0.01)
    looks: list[None] = []
    real = following.Notes.life

    def life(self: following.Notes, sign: Sign) -> None:
        looks.append(None)
        real(self, sign)
        if len(looks) == 2:
            says(run, "succeeded")

    monkeypatch.setattr(following.Notes, "life", life)

    assert main([str(run.root)]) == 0
    shown = capsys.readouterr().out
    assert "job 41 is pending: Resources (waiting for free nodes)" in shown
    assert "step 1/10" in shown
