"""Ends that are no failure: the time limit, preemption, a wish of people's. First a checkpoint, then the next attempt."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from launch.job import Termination
from launch.stops import LEAST_GRACE_S, UNMEASURED_GRACE_S, Measured, Requeued, grace_s, lead_s
from launch.supervisor import ENDING_S
from launch.verdict import Cause, Success
from stages.stopping import read_stop_request
from tests.supervisor_world import CANCEL, MemoryRunner, World, world

DONE = Success({0: {}})
STOPPED_AT = Success({0: {"stopped_at": 7}})
NO_SPACE = Cause("trainer", "error", "exited 1: SaveError: no space", 1)


def ended_at(run: World, what: str) -> list[str]:
    lines = [json.loads(line) for line in run.run.events_jsonl.read_text().splitlines()]
    return [line["phase"] for line in lines if line["event"] == what]


def test_the_warning_before_the_limit_asks_for_a_checkpoint_and_requeues() -> None:
    with world() as run:
        run.at(2.0, "warning")

        ending = run.supervise()

        assert ending == Requeued("requeue", "the time limit is near (SIGUSR1)", "1")
        assert run.state()["phase"] == "requeued"
        assert run.job.handed_over
        for name in ("trainer", "controller"):
            assert run.runner.step(name).verdict == STOPPED_AT
        request = read_stop_request(run.run)
        assert request is not None
        assert (request.kind, request.grace_s) == ("checkpoint", UNMEASURED_GRACE_S)


def test_the_rollout_serves_until_the_checkpoint_is_there() -> None:
    with world() as run:
        run.save_s = 20.0
        run.at(2.0, "warning")
        run.at(15.0, "look")
        seen: list[str] = []
        happen = run.happen

        def look(what: str, detail: object) -> None:
            if what == "look":
                seen.extend(run.runner.running())
            happen(what, detail)

        run.happen = look  # type: ignore[method-assign]

        run.supervise()

        assert sorted(seen) == ["controller", "rollout_000", "rollout_001", "trainer"]


def test_a_checkpoint_that_does_not_come_is_not_waited_for_for_ever() -> None:
    with world() as run:
        run.save_s = None
        run.at(2.0, "warning")

        assert isinstance(run.supervise(), Requeued)
        assert UNMEASURED_GRACE_S <= run.now_s - 2.0 < UNMEASURED_GRACE_S + 10.0


def test_it_waits_no_longer_than_the_allocation_lasts() -> None:
    with world() as run:
        run.save_s, run.job.end_s = None, 62.0
        run.at(2.0, "warning")

        assert isinstance(run.supervise(), Requeued)
        assert run.now_s < 62.0 - ENDING_S + 10.0


def test_a_trainer_that_cannot_save_is_the_cause() -> None:
    with world() as run:
        run.save_s = None
        run.at(2.0, "warning")
        run.at(4.0, "trainer", NO_SPACE)

        assert run.supervise() == NO_SPACE
        assert run.job.restarted == []


def test_an_instance_that_fails_meanwhile_is_left_alone() -> None:
    with world() as run:
        run.save_s = 5.0
        run.at(2.0, "warning")
        run.at(3.0, "rollout_000", Cause("rollout_000", "signal", "killed by SIGKILL", 137))

        assert isinstance(run.supervise(), Requeued)
        assert run.restarts_of("rollout_000") == []


def test_a_run_that_ends_well_meanwhile_has_succeeded() -> None:
    with world() as run:
        run.save_s = None
        run.at(2.0, "warning")
        run.at(3.0, "over", "success")
        run.at(3.0, "trainer", DONE)
        run.at(3.5, "controller", DONE)

        assert run.supervise() is None
        assert run.state()["phase"] == "succeeded"


def test_a_cancelled_run_does_not_wait_for_the_checkpoint_that_was_asked_for() -> None:
    with world() as run:
        run.save_s = None
        run.at(2.0, "warning")
        run.at(4.0, "cancel")

        assert run.supervise() == CANCEL
        assert run.now_s < 10.0


def test_where_it_may_not_be_started_again_the_run_ends_with_the_reason() -> None:
    with world() as run:
        run.refusal = "it was started again 10 times"
        run.at(2.0, "warning")

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert (cause.kind, cause.exit_code) == ("time_limit", 124)
        assert cause.message == "the time limit is near (SIGUSR1); it was started again 10 times"
        assert run.job.restarted == []
        assert not run.job.handed_over


def test_a_refused_requeue_is_a_failure_that_says_what_is_saved() -> None:
    with world() as run:
        run.job.refused = "requeueing is disabled"
        run.at(2.0, "warning")

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert cause.message == "the time limit is near (SIGUSR1); there is no checkpoint; requeueing is disabled"
        assert run.state()["phase"] == "failed"


@pytest.mark.parametrize("why", ["node_failure", "requeued"])
def test_a_job_that_slurm_takes_back_is_left_at_once_and_goes_on(why: str) -> None:
    with world() as run:
        run.job.term = Termination(why, is_requeued=True)
        run.at(2.0, "cancel")

        ending = run.supervise()

        assert isinstance(ending, Requeued)
        assert ending.how == "slurm"
        assert run.now_s < 5.0
        assert run.job.restarted == []
        assert run.state()["stop"] == {"kind": why, "reason": ending.reason}


@pytest.mark.parametrize("why, code", [("node_failure", 143), ("time_limit", 124)])
def test_a_job_that_slurm_ends_for_good_is_followed_by_another(why: str, code: int) -> None:
    with world() as run:
        run.job.term = Termination(why)
        run.at(2.0, "cancel")

        assert isinstance(run.supervise(), Requeued)
        assert run.job.restarted == [why]
        assert run.now_s < 5.0

    with world() as run:
        run.job.term, run.job.refused = Termination(why), "slurm.requeue=never"
        run.at(2.0, "cancel")

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert (cause.kind, cause.exit_code) == (why, code)


def test_a_preempted_job_saves_and_is_requeued() -> None:
    with world() as run:
        run.job.term, run.job.end_s = Termination("preempted"), 60.0
        run.at(2.0, "cancel")
        run.interruption.cause = None

        ending = run.supervise()

        assert isinstance(ending, Requeued)
        assert run.job.restarted == ["preempted"]


def test_a_preemption_whose_term_only_the_steps_get_is_noticed_by_their_end() -> None:
    with world() as run:
        run.job.term = Termination("preempted")
        for name in ("rollout_000", "trainer", "controller"):
            run.at(2.0, name, Success({0: {"stopped": True}}))

        assert isinstance(run.supervise(), Requeued)
        assert run.job.restarted == ["preempted"]
        assert run.restarts_of("rollout_000") == []


def test_a_warning_of_a_preemption_is_told_from_that_of_the_limit() -> None:
    with world() as run:
        run.job.term = Termination("preempted")
        run.at(2.0, "warning")

        ending = run.supervise()

        assert isinstance(ending, Requeued)
        assert ending.reason == "the job was preempted (SIGUSR1)"
        assert run.runner.step("trainer").verdict == STOPPED_AT


def test_people_can_end_a_run_with_a_checkpoint() -> None:
    with world() as run:
        run.at(2.0, "ask", True)

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert (cause.kind, cause.exit_code) == ("cancelled", 143)
        assert cause.message.startswith("the run was cancelled by me@here (launch.cancel --checkpoint)")
        assert run.runner.step("trainer").verdict == STOPPED_AT
        assert run.job.restarted == []


def test_people_can_end_a_run_now() -> None:
    with world() as run:
        run.at(2.0, "ask", False)

        cause = run.supervise()

        assert cause == Cause("supervisor", "cancelled", "the run was cancelled by me@here", 143)
        assert read_stop_request(run.run) is None


def test_people_can_hurry_a_run_that_saves_a_checkpoint() -> None:
    with world() as run:
        run.save_s = None
        run.at(2.0, "ask", True)
        run.at(10.0, "ask", False)

        cause = run.supervise()

        assert cause == Cause("supervisor", "cancelled", "the run was cancelled by me@here", 143)
        assert run.now_s < 15.0


@pytest.mark.parametrize("checkpoint", [True, False])
def test_people_can_end_a_run_that_saves_a_checkpoint_to_be_requeued(checkpoint: bool) -> None:
    with world() as run:
        run.save_s = 20.0
        run.at(2.0, "warning")
        run.at(10.0, "ask", checkpoint)

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert cause.message.startswith("the run was cancelled by me@here")
        assert run.state()["phase"] == "failed"
        assert not run.job.handed_over


def test_a_request_that_comes_when_the_checkpoint_is_there_prevents_the_requeue() -> None:
    with world(MemoryRunner(stubborn=["rollout_000"])) as run:
        run.at(2.0, "warning")
        run.at(run.save_s + 3.0 if run.save_s else 3.0, "ask", False)

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert cause.exit_code == 143


def test_the_cause_of_a_stop_is_the_only_word_before_the_last_one() -> None:
    with world(MemoryRunner(stubborn=["rollout_000"])) as run:
        run.at(2.0, "warning")

        run.supervise()

        assert ended_at(run, "phase") == ["starting", "running", "stopping", "requeued"]
        assert run.state()["cause"] is None


def test_the_supervisor_stops_by_itself_when_a_checkpoint_would_no_longer_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.measured.CheckpointTimes.latest", lambda _: Measured(save_s=10.0, step_s=5.0))
    with world() as run:
        run.job.end_s = 400.0
        ending = run.supervise()

        assert isinstance(ending, Requeued)
        assert "the time limit is near (" in ending.reason
        assert 400.0 - 90.0 <= run.now_s <= 400.0 - 90.0 + 5.0


def test_grace_follows_what_the_trainer_measured() -> None:
    assert grace_s(Measured(0.5, 1.0)) == LEAST_GRACE_S
    assert grace_s(Measured(100.0, 20.0)) == 340.0
    assert grace_s(None) == UNMEASURED_GRACE_S


def test_a_short_job_keeps_most_of_its_time() -> None:
    assert lead_s(Measured(0.1, 0.5), limit_s=60.0) == pytest.approx(16.2)
    assert lead_s(Measured(100.0, 20.0), limit_s=86400.0) == 300.0
    assert lead_s(None, limit_s=86400.0) == 0.0


def test_stops_are_records_of_this_attempt_only() -> None:
    with world() as run:
        run.at(2.0, "warning")
        run.supervise()
        run.run.start_attempt(1)

        assert read_stop_request(replace(run.run, attempt=1)) is None
