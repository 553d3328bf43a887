"""Attempts: how each begins, what it may not act on, and when the run is not started again by itself."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.attempts import AUTOMATIC, Attempt, begin, cancelled_before, history, next_refusal, refusal
from launch.cancel_request import CancelRequest, write_cancel_request
from stages.desired import read_desired
from stages.members import given_up, write_given_up
from stages.rundir import FencedError, RunDir
from stages.stopping import StopRequest, read_stop_request, write_stop_request
from tests.fake_runs import fake_config, fake_plan, fake_run
from tests.fake_stages import save_checkpoint

CONFIG = fake_config("slurm")


@pytest.fixture
def base(tmp_path: Path) -> RunDir:
    run = fake_run(tmp_path / "run", CONFIG, fake_plan())
    return replace(run, writer="supervisor")


def start(base: RunDir, restarts: int = 0, reason: str = "first") -> RunDir:
    return begin(base, CONFIG, mode="slurm", job_id="41", restarts=restarts, reason=reason)


def say(run: RunDir, phase: str, kind: str = "time_limit") -> None:
    stop = {"stop": {"kind": kind, "reason": "..."}} if kind else {}
    run.write(run.state_json, {"phase": phase, **stop})


def test_the_first_attempt_starts_from_nothing(base: RunDir) -> None:
    start(base)

    assert history(base) == [Attempt(0, "41", 0, "first", -1)]


def test_a_job_that_slurm_runs_again_is_the_next_attempt_from_the_newest_checkpoint(base: RunDir) -> None:
    first = start(base)
    save_checkpoint(first, 5, ranks=1)
    say(first, "requeued")

    second = start(base, restarts=1)

    assert second.attempt == 1
    assert history(base)[-1] == Attempt(1, "41", 5, "requeue", 0)
    submission = second.read(second.submission_json) or {}
    assert (submission["mode"], submission["job_id"]) == ("slurm", "41")
    assert (second.logs / "supervisor.log").resolve() == (base.logs / "supervisor.log").resolve()
    assert (second.submitit / "41_0_log.out").is_symlink()
    desired = read_desired(second)
    assert desired is not None
    assert desired.phase == "run"


def test_a_job_that_follows_another_makes_its_own_desired_state(base: RunDir) -> None:
    start(base)
    base.start_attempt(1)
    following = replace(base, attempt=1)

    begin(following, CONFIG, mode="slurm", job_id="52", restarts=0, reason="chain")

    assert history(base)[-1] == Attempt(1, "52", 0, "chain", 0)
    assert read_desired(following) is not None


@pytest.mark.parametrize(("reason", "wanted"), [("chain", CancelRequest(False, "ada@login1")), ("resume", None)])
def test_a_request_that_came_too_late_for_an_attempt_holds_for_the_one_that_follows_by_itself(
    base: RunDir, reason: str, wanted: CancelRequest | None
) -> None:
    start(base)
    write_cancel_request(base, CancelRequest(False, "ada@login1"))
    base.start_attempt(1)

    second = begin(replace(base, attempt=1), CONFIG, mode="slurm", job_id="52", restarts=0, reason=reason)

    assert cancelled_before(second) == wanted


def test_a_first_attempt_has_none_before_it_that_was_cancelled(base: RunDir) -> None:
    assert cancelled_before(start(base)) is None


def test_the_older_attempt_is_fenced_out(base: RunDir) -> None:
    first = start(base)
    start(base, restarts=1)

    with pytest.raises(FencedError):
        first.write(first.state_json, {"phase": "running"})


def test_what_an_older_attempt_left_does_not_count(base: RunDir) -> None:
    first = start(base)
    write_stop_request(first, StopRequest("checkpoint", "the time limit", 30.0))
    write_given_up(first, {"rollout_000": "its node failed"})
    first.write(first.instance_json("rollout_000"), {"state": "ready"})
    first.write(first.request_json(0), {"version": 0})

    second = start(base, restarts=1)

    assert read_stop_request(second) is None
    assert given_up(second) == {}
    assert second.read(second.instance_json("rollout_000")) is None
    assert second.read(second.request_json(0)) is None


@pytest.mark.parametrize(
    "phase, kind, reason",
    [
        ("requeued", "time_limit", "requeue"),
        ("requeued", "preempted", "requeue"),
        ("requeued", "node_failure", "node_failure"),
        ("running", "", "node_failure"),
        ("stopping", "time_limit", "requeue"),
        ("failed", "", "requeue"),
    ],
)
def test_the_last_word_of_an_attempt_says_why_there_is_another(
    base: RunDir, phase: str, kind: str, reason: str
) -> None:
    say(start(base), phase, kind)

    start(base, restarts=1)

    assert history(base)[-1].reason == reason


def test_an_attempt_that_never_said_anything_was_ended_by_the_machine(base: RunDir) -> None:
    start(base)
    start(base, restarts=1)

    assert history(base)[-1].reason == "node_failure"


def test_a_job_that_somebody_overtook_does_not_go_on(base: RunDir) -> None:
    start(base)
    base.start_attempt(2)

    with pytest.raises(FencedError):
        start(base, restarts=1)


def test_a_job_does_not_take_the_attempt_of_another(base: RunDir) -> None:
    start(base)
    base.start_attempt(1)

    with pytest.raises(FencedError, match="by another job than 41"):
        start(base, restarts=1)


def test_numbers_may_have_gaps(base: RunDir) -> None:
    """A job that Slurm could not launch is counted by Slurm, and left no attempt."""
    start(base)
    start(base, restarts=3)

    assert [(attempt.number, attempt.previous) for attempt in history(base)] == [(0, -1), (3, 0)]


def test_a_record_that_the_launcher_wrote_stays(base: RunDir) -> None:
    base.write(base.attempt_json, {"job_id": "", "resumed_step": 7, "reason": "resume", "previous": 0})

    start(base)

    assert history(base) == [Attempt(0, "", 7, "resume", 0)]


# ---- when it has to end ---------------------------------------------------------------------------------------------


def row(*steps: int, reason: str = "requeue") -> list[Attempt]:
    """A first attempt and those that followed by themselves, with the steps that they started from."""
    return [
        Attempt(number, "1", step, "first" if number == 0 else reason, number - 1) for number, step in enumerate(steps)
    ]


def test_one_attempt_without_progress_may_follow_another_one_may_not() -> None:
    assert refusal(row(0, 0), 10, 1) == ""
    assert refusal(row(10, 20, 20), 10, 1) == ""
    assert "no progress: since attempt 0 no checkpoint was saved beyond step 0" in refusal(row(0, 0, 0), 10, 1)
    assert "since attempt 1 no checkpoint was saved beyond step 20" in refusal(row(10, 20, 20, 20), 10, 1)


def test_a_step_back_is_no_progress() -> None:
    assert refusal(row(20, 10, 10), 10, 1).startswith("no progress")


def test_restarts_are_bounded_in_all() -> None:
    assert refusal(row(0, 10, 20), 2, 1) == ""
    assert "started again 2 times by itself (launch.max_restarts)" in refusal(row(0, 10, 20, 30), 2, 1)


def test_a_person_may_start_it_as_often_as_they_like() -> None:
    by_hand = [replace(attempt, reason="resume") for attempt in row(0, 0, 0, 0, 0)]

    assert refusal(by_hand, 0, 0) == ""


def test_a_person_starts_the_count_anew() -> None:
    attempts = row(0, 0, 0)
    attempts.append(Attempt(3, "2", 0, "resume", 2))

    assert refusal(attempts, 10, 1) == ""
    assert refusal([*attempts, Attempt(4, "2", 0, "requeue", 3)], 10, 1) == ""


@given(
    gains=st.lists(st.integers(0, 1), max_size=60),
    reasons=st.lists(st.sampled_from(AUTOMATIC), min_size=60, max_size=60),
    max_restarts=st.integers(0, 12),
    max_idle=st.integers(0, 4),
)
def test_whatever_happens_a_run_is_not_started_by_itself_for_ever(
    gains: list[int], reasons: list[str], max_restarts: int, max_idle: int
) -> None:
    attempts, step, idle = [Attempt(0, "1", 0, "first", -1)], 0, 0
    for gain, reason in zip(gains, reasons, strict=False):
        step += gain
        following = [*attempts, Attempt(len(attempts), "1", step, reason, len(attempts) - 1)]
        if refusal(following, max_restarts, max_idle):
            break
        attempts, idle = following, 0 if gain else idle + 1
        assert idle <= max_idle

    assert len(attempts) - 1 <= max_restarts


def test_the_next_attempt_is_judged_by_the_checkpoint_that_it_would_start_from(base: RunDir) -> None:
    config = fake_config("slurm")
    config.launch.max_restarts_without_progress = 0
    run = start(base)

    before = next_refusal(run, config)
    save_checkpoint(run, 5, ranks=1)

    assert before.startswith("no progress: since attempt 0")
    assert next_refusal(run, config) == ""


def test_links_survive_a_moved_run_directory(base: RunDir) -> None:
    start(base)
    (base.logs / "supervisor.log").write_text("both attempts\n")
    second = start(base, restarts=1)

    moved = base.root.with_name("elsewhere")
    os.rename(base.root, moved)

    log = moved / second.logs.relative_to(base.root) / "supervisor.log"
    assert log.read_text() == "both attempts\n"
