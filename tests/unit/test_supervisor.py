"""The supervisor's state machine, over steps that exist only in memory and a clock that the test owns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launch.desired_steps import desired_steps
from launch.steps import Step
from launch.stops import Requeued
from launch.supervisor import ENDED_OUTSIDE, FINISH_WAIT_S, TERM_WAIT_S, TICK_S, Limits
from launch.verdict import Cause, Success
from stages.desired import StepSpec, read_desired
from tests.fake_runs import fake_config, fake_plan
from tests.supervisor_world import CANCEL, MemoryRunner, world

DONE = Success({0: {}})
STOPPED = Success({0: {"stopped": True}})
KILLED = Cause("trainer", "signal", "killed by SIGKILL", 137)
TRAINER_RAISED = Cause("trainer", "error", "exited 1: SaveError: no space", 1)
RAISED = Cause("rollout_000", "error", "exited 1: VllmStartError: no port", 1)


def test_a_run_succeeds_when_trainer_and_controller_did() -> None:
    with world() as run:
        run.at(2.0, "trainer", DONE)
        run.at(3.0, "over", "success")
        run.at(3.0, "controller", DONE)

        assert run.supervise() is None
        assert run.state()["phase"] == "succeeded"
        assert sorted(run.runner.asked) == ["rollout_000", "rollout_001"]


def test_the_rollout_serves_until_trainer_and_controller_have_ended() -> None:
    with world() as run:
        run.at(1.0, "over", "success")
        run.at(2.0, "controller", DONE)
        run.at(9.0, "trainer", DONE)

        assert run.supervise() is None
        assert run.now_s >= 9.0


def test_a_failed_trainer_ends_the_run_with_its_own_words_and_code() -> None:
    with world() as run:
        run.at(2.0, "trainer", replace(TRAINER_RAISED, exit_code=9))

        cause = run.supervise()

        assert cause == replace(TRAINER_RAISED, exit_code=9)
        assert run.state()["phase"] == "failed"
        assert run.state()["cause"] == {**vars(cause)}
        assert run.runner.running() == []


def test_the_cause_is_on_disk_before_anything_is_stopped() -> None:
    with world() as run:
        seen: list[object] = []
        ask = run.runner.ask_to_stop

        def look_and_ask(steps: Sequence[Step]) -> None:
            seen.append(run.state()["cause"])
            ask(steps)

        run.runner.ask_to_stop = look_and_ask  # type: ignore[method-assign]
        run.at(2.0, "trainer", KILLED)

        run.supervise()

        assert seen == [vars(KILLED)]


def test_a_killed_process_is_named_before_one_that_failed_because_of_it() -> None:
    with world() as run:
        run.at(2.0, "rollout_000", RAISED)
        run.at(2.1, "trainer", KILLED)

        assert run.supervise() == KILLED


def test_the_earliest_of_two_failures_is_the_cause() -> None:
    with world() as run:
        run.at(2.0, "rollout_000", RAISED)
        run.at(2.0 + TICK_S, "trainer", Cause("trainer", "error", "exited 1: peer lost", 1))

        assert run.supervise() == RAISED


def test_a_cancelled_run_is_not_blamed_on_a_stage_that_left_first() -> None:
    with world() as run:
        run.at(2.0, "rollout_001", STOPPED)
        run.at(2.5, "cancel")

        assert run.supervise() == CANCEL


@pytest.mark.parametrize("end", [STOPPED, KILLED, RAISED])
def test_a_step_that_ended_with_the_whole_job_is_not_blamed_although_our_term_comes_seconds_later(
    end: Success | Cause,
) -> None:
    with world() as run:
        run.at(1.9, "ending")
        run.at(2.0, "rollout_000", end)
        run.at(9.0, "cancel")

        assert run.supervise() == CANCEL
        assert run.restarts_of("rollout_000") == []


def test_a_job_that_slurm_is_ending_has_an_end_although_no_term_comes() -> None:
    with world() as run:
        run.at(1.9, "ending")
        run.at(2.0, "rollout_000", STOPPED)

        assert run.supervise() == Cause("supervisor", "cancelled", ENDED_OUTSIDE, 143)
        assert run.now_s < 2.0 + TERM_WAIT_S + 3.0


def test_an_instance_whose_component_was_cancelled_is_a_failure_with_an_explanation() -> None:
    with world() as run:
        run.runner.ended_component = True
        run.at(2.0, "rollout_001", STOPPED)

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert cause.step == "rollout_001"
        assert "stopped from outside" in cause.message
        assert "component 1 is CANCELLED" in cause.message


def test_a_controller_that_twice_ends_without_ending_the_run_is_a_failure() -> None:
    with world() as run:
        run.at(2.0, "controller", DONE)
        run.at(6.0, "controller", DONE)

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert (cause.step, cause.kind) == ("controller", "ended")


def test_a_rollout_that_fails_after_the_run_was_over_does_not_spoil_it() -> None:
    with world() as run:
        run.at(1.0, "trainer", DONE)
        run.at(2.0, "over", "success")
        run.at(2.0, "rollout_000", RAISED)
        run.at(4.0, "controller", DONE)

        assert run.supervise() is None


def test_a_trainer_that_fails_after_the_run_was_declared_over_fails_it() -> None:
    with world() as run:
        run.at(2.0, "over", "success")
        run.at(3.0, "trainer", KILLED)

        assert run.supervise() == KILLED


def test_a_trainer_that_does_not_end_is_given_up_in_time() -> None:
    with world() as run:
        run.at(2.0, "over", "success")
        run.at(2.0, "controller", DONE)

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert (cause.step, cause.kind) == ("trainer", "late")
        assert FINISH_WAIT_S <= run.now_s - 2.0 < FINISH_WAIT_S + 5.0


def test_the_controller_can_end_the_run_as_a_failure() -> None:
    with world() as run:
        run.at(2.0, "over", "failure")

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert str(cause) == "controller: because"


def test_a_step_that_ignores_term_is_killed_after_its_grace() -> None:
    with world(MemoryRunner(stubborn=["trainer"])) as run:
        run.at(2.0, "over", "failure")

        run.supervise()

        grace_s = next(spec.grace_s for spec in run.desired.steps if spec.name == "trainer")
        assert run.runner.killed == ["trainer"]
        assert grace_s <= run.now_s - 2.0 < grace_s + 1.5


def test_a_rollout_has_its_longer_grace_after_a_success_but_not_after_a_failure() -> None:
    waits = []
    for over in (True, False):
        with world(MemoryRunner(stubborn=["rollout_000"])) as run:
            run.at(2.0, "trainer", DONE if over else KILLED)
            run.at(2.0, "over", "success")
            run.at(2.0, "controller", DONE)
            run.supervise()
            waits.append(run.now_s - 2.0)

    assert waits[0] >= 12.0
    assert waits[1] < 8.0


def test_a_step_that_cannot_be_started_stops_the_others() -> None:
    with world(MemoryRunner(broken=["controller"])) as run:
        cause = run.supervise()

        assert cause == Cause("controller", "start", "no room")
        assert run.runner.running() == []


def test_a_step_taken_out_of_the_desired_state_is_stopped_and_a_new_one_started() -> None:
    with world() as run:
        fewer = replace(run.desired, steps=tuple(s for s in run.desired.steps if s.name != "rollout_001"))
        run.at(2.0, "desired", fewer)
        run.at(4.0, "desired", run.desired)
        run.at(6.0, "trainer", DONE)
        run.at(6.0, "over", "success")
        run.at(6.0, "controller", DONE)

        assert run.supervise() is None
        assert [step.incarnation.label for step in run.runner.started if step.spec.name == "rollout_001"] == [
            "rollout_001",
            "rollout_001.1",
        ]


def test_a_broken_desired_state_stops_everything() -> None:
    with world() as run:
        run.interruption.wait = lambda seconds: run.run.desired_json.write_text("{")  # type: ignore[method-assign, assignment]

        with pytest.raises(ValueError, match="Expecting"):
            run.supervise()

        assert run.runner.running() == []
        assert run.state()["phase"] == "failed"


def test_a_newer_attempt_ends_this_one() -> None:
    with world() as run:
        run.at(2.0, "fence")
        happen = run.happen
        run.happen = lambda what, detail: run.run.start_attempt(1) if what == "fence" else happen(what, detail)  # type: ignore[method-assign]

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert "attempt 0 (launcher) is over" in cause.message
        assert run.runner.running() == []


def test_the_heartbeat_moves_every_second() -> None:
    with world() as run:
        beats: list[int] = []
        for second in range(2, 8):
            run.at(second, "look")
        happen = run.happen

        def look(what: str, detail: object) -> None:
            if what == "look":
                beats.append(int(str(run.state()["heartbeat"])))
            happen(what, detail)

        run.happen = look  # type: ignore[method-assign]
        run.at(9.0, "cancel")

        run.supervise()

        assert sorted(set(beats)) == beats


def test_events_tell_the_story_in_order() -> None:
    with world() as run:
        run.at(2.0, "trainer", KILLED)

        run.supervise()

        lines = [json.loads(line) for line in run.run.events_jsonl.read_text().splitlines()]
        assert [line["phase"] for line in lines if line["event"] == "phase"] == [
            "starting",
            "running",
            "stopping",
            "failed",
        ]
        assert next(line for line in lines if line["event"] == "fatal")["step"] == "trainer"


VERDICTS = [DONE, STOPPED, KILLED, RAISED]
NAMES = ["trainer", "controller", "rollout_000", "rollout_001"]
MOMENT = st.floats(0.0, 40.0, allow_nan=False)
WORD = "over, says the controller"
ENDINGS = st.tuples(MOMENT, st.sampled_from(NAMES), st.sampled_from(VERDICTS))
ORDERS = st.tuples(MOMENT, st.just(WORD), st.sampled_from(["success", "failure"]))
CANCELS = st.tuples(MOMENT, st.just("cancel"), st.none())
STOPS = st.tuples(MOMENT, st.just("warning"), st.none())
ASKED = st.tuples(MOMENT, st.just("ask"), st.booleans())
LOSSES = st.tuples(MOMENT, st.just("lose"), st.sampled_from(["node0", "node1"]))


@settings(max_examples=2 * settings().max_examples, deadline=None)
@example(
    events=[(0.0, WORD, "success"), (1.0, WORD, "failure"), (0.0, "warning", None)],
    last=(40.0, "cancel", None),
    stubborn={"rollout_000"},
    broken=set(),
    save_s=0.0,
    min_instances=0,
)
@given(
    events=st.lists(st.one_of(ENDINGS, ENDINGS, ENDINGS, ORDERS, CANCELS, STOPS, ASKED, LOSSES), max_size=12),
    last=st.tuples(st.floats(40.0, 50.0), st.just("cancel"), st.none()),
    stubborn=st.sets(st.sampled_from(NAMES)),
    broken=st.sets(st.sampled_from(NAMES), max_size=1),
    save_s=st.one_of(st.none(), st.floats(0.0, 5.0)),
    min_instances=st.integers(0, 2),
)
def test_whatever_happens_no_step_runs_after_the_supervisor_and_its_last_word_is_true(
    events: list[tuple[float, str, object]],
    last: tuple[float, str, None],
    stubborn: set[str],
    broken: set[str],
    save_s: float | None,
    min_instances: int,
) -> None:
    with world(MemoryRunner(sorted(stubborn), sorted(broken), nodes=2)) as run:
        run.save_s, run.limits = save_s, Limits(min_instances=min_instances)
        for event in [*events, last]:
            run.at(*event)

        ending = run.supervise()

        assert run.runner.running() == []
        assert run.state()["phase"] == {type(None): "succeeded", Cause: "failed", Requeued: "requeued"}[type(ending)]
        assert run.job.handed_over is (len(run.job.restarted) > 0) is isinstance(ending, Requeued)
        for spec in run.desired.steps:
            assert len(run.restarts_of(spec.name)) <= spec.max_restarts
        if ending is None:
            wanted = read_desired(run.run)
            assert wanted is not None
            assert (wanted.phase, wanted.outcome) == ("stop", "success")


def test_specs_of_the_fake_plan_are_what_these_tests_assume() -> None:
    specs: tuple[StepSpec, ...] = desired_steps(fake_config(), fake_plan()).steps

    assert sorted(spec.name for spec in specs) == sorted(NAMES)
