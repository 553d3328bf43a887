"""Failed steps that the supervisor starts again, moves, or goes on without, over steps that exist only in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from launch.exclusions import excluded_nodes
from launch.stops import Requeued
from launch.supervisor import TICK_S, Limits
from launch.verdict import Cause, Success
from stages.desired import StepSpec, write_desired
from stages.members import given_up
from stages.weights.instances import write_status
from tests.supervisor_world import MemoryRunner, World, world
from tests.weights_kit import make_status

DONE = Success({0: {}})
STOPPED = Success({0: {"stopped": True}})
RAISED = Cause("rollout_001", "error", "exited 1: ServerDiedError: gone", 1)


def killed(step: str) -> Cause:
    return Cause(step, "signal", "killed by SIGKILL", 137, "the last line")


def finish(run: World, at_s: float) -> None:
    for name in ("trainer", "controller"):
        run.at(at_s, name, DONE)
    run.at(at_s, "over", "success")


def serve(run: World, name: str, **changes: Any) -> None:
    write_status(replace(run.run, writer=name), make_status(name, **{"version": 0, **changes}))


def events(run: World, what: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.run.events_jsonl.read_text().splitlines()]
    return [line for line in lines if line["event"] == what]


@pytest.mark.parametrize("verdict", [killed("rollout_001"), DONE, STOPPED], ids=["killed", "ended", "stopped"])
def test_an_instance_that_is_gone_is_started_again_and_the_run_succeeds(verdict: Success | Cause) -> None:
    with world() as run:
        run.at(2.0, "rollout_001", verdict)
        finish(run, 10.0)

        assert run.supervise() is None
        assert [step.incarnation.label for step in run.runner.started if step.spec.name == "rollout_001"] == [
            "rollout_001",
            "rollout_001.1",
        ]


def test_state_and_events_tell_how_often_and_why() -> None:
    with world() as run:
        run.at(2.0, "rollout_001", killed("rollout_001"))
        run.at(6.0, "rollout_001", killed("rollout_001"))
        finish(run, 12.0)

        run.supervise()

        step = run.state()["steps"]["rollout_001"]  # type: ignore[index]
        assert (step["restarts"], step["reason"]) == (2, "killed by SIGKILL")
        assert [(line["restarts"], line["wait_s"]) for line in events(run, "restart")] == [(1, 1.0), (2, 2.0)]


def test_it_waits_a_second_then_two_then_four() -> None:
    with world() as run:
        for at_s in (2.0, 10.0, 20.0):
            run.at(at_s, "rollout_001", killed("rollout_001"))
        finish(run, 30.0)

        run.supervise()

        waited = [start - end for start, end in zip(run.restarts_of("rollout_001"), (2.0, 10.0, 20.0), strict=True)]
        assert all(0 <= found - wanted < 3 * TICK_S for found, wanted in zip(waited, (1.0, 2.0, 4.0), strict=True))


def test_when_its_budget_is_used_up_the_run_ends_with_the_instances_own_code_and_log() -> None:
    with world() as run:
        for at_s in (2.0, 10.0, 20.0, 40.0):
            run.at(at_s, "rollout_001", killed("rollout_001"))

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert (cause.step, cause.kind, cause.exit_code, cause.log_tail) == (
            "rollout_001",
            "signal",
            137,
            "the last line",
        )
        assert cause.message == (
            "killed by SIGKILL; it had been replaced 3 times, as often as rollout.max_replacements allows"
        )


def test_budgets_are_each_instances_own() -> None:
    with world() as run:
        for at_s in (2.0, 10.0, 20.0):
            run.at(at_s, "rollout_000", killed("rollout_000"))
            run.at(at_s, "rollout_001", killed("rollout_001"))
        finish(run, 40.0)

        assert run.supervise() is None


def test_a_controller_is_started_again_once() -> None:
    with world() as run:
        run.at(2.0, "controller", killed("controller"))
        finish(run, 6.0)

        assert run.supervise() is None
        assert len(run.restarts_of("controller")) == 1


def test_a_controller_that_fails_again_ends_the_run() -> None:
    with world() as run:
        run.at(2.0, "controller", killed("controller"))
        run.at(6.0, "controller", killed("controller"))

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert (cause.step, cause.exit_code) == ("controller", 137)
        assert "started again once" in cause.message


def test_a_step_is_started_again_only_when_nothing_of_it_runs_any_more() -> None:
    with world(MemoryRunner(stubborn=["rollout_001"])) as run:
        run.limits = Limits(failure_grace_s=5.0)
        run.at(2.0, "half dead")
        happen = run.happen

        def half_dead(what: str, detail: object) -> None:
            if what == "half dead":
                run.runner.step("rollout_001").verdict = killed("rollout_001")  # one task of it; others still run
            happen(what, detail)

        run.happen = half_dead  # type: ignore[method-assign]
        finish(run, 20.0)

        assert run.supervise() is None
        assert run.runner.killed[0] == "rollout_001"
        assert run.restarts_of("rollout_001")[0] >= 2.0 + 5.0


def test_an_instance_that_raises_before_any_has_served_ends_the_run_at_once() -> None:
    with world() as run:
        run.at(2.0, "rollout_001", RAISED)

        assert run.supervise() == RAISED


def test_an_instance_that_raises_when_another_serves_is_replaced() -> None:
    with world() as run:
        serve(run, "rollout_000")
        run.at(2.0, "rollout_001", RAISED)
        finish(run, 10.0)

        assert run.supervise() is None
        assert len(run.restarts_of("rollout_001")) == 1


def test_an_instance_whose_heartbeat_stands_still_is_killed_and_replaced() -> None:
    with world() as run:
        run.limits = Limits(heartbeat_timeout_s=10.0)
        serve(run, "rollout_000", heartbeat=5)
        run.at(25.0, "over", "success")
        run.at(25.0, "trainer", DONE)
        run.at(25.0, "controller", DONE)

        assert run.supervise() is None
        assert run.runner.killed == ["rollout_000"]
        assert events(run, "restart")[0]["kind"] == "silent"
        assert 10.0 <= run.restarts_of("rollout_000")[0] < 15.0


def test_a_supervisor_that_was_held_up_itself_calls_nobody_silent() -> None:
    with world() as run:
        run.limits = Limits(heartbeat_timeout_s=10.0)
        serve(run, "rollout_000", heartbeat=5)
        happen = run.happen

        def hold_up(what: str, detail: object) -> None:
            if what == "hold up":
                run.now_s += 30.0
            elif what == "beat":
                serve(run, "rollout_000", heartbeat=6)
            else:
                happen(what, detail)

        run.happen = hold_up  # type: ignore[method-assign]
        run.at(5.0, "hold up")
        run.at(36.0, "beat")
        finish(run, 40.0)

        assert run.supervise() is None
        assert run.runner.killed == []


def test_the_record_of_an_earlier_start_does_not_make_a_new_one_silent() -> None:
    with world() as run:
        run.limits = Limits(heartbeat_timeout_s=5.0)
        serve(run, "rollout_000", heartbeat=5, incarnation=0)
        run.at(1.0, "rollout_000", killed("rollout_000"))
        finish(run, 30.0)

        run.supervise()

        assert len(run.restarts_of("rollout_000")) == 1


def test_a_trainer_that_fails_while_an_instance_is_away_is_the_cause() -> None:
    with world() as run:
        run.at(2.0, "rollout_001", killed("rollout_001"))
        run.at(2.5, "trainer", killed("trainer"))

        assert run.supervise() == killed("trainer")


def test_a_node_where_replacements_fail_twice_is_excluded_from_the_next_job() -> None:
    with world() as run:
        for at_s in (2.0, 10.0, 20.0):
            run.at(at_s, "rollout_001", killed("rollout_001"))
        finish(run, 40.0)

        run.supervise()

        assert list(excluded_nodes(run.run)) == ["node0"]
        assert events(run, "excluded")[0]["node"] == "node0"


def spread(run: World, *nodes: int) -> None:
    """One trainer on node 0, an instance on each of `nodes`; every node has room for two GPUs."""
    trainer, controller = (spec for spec in run.desired.steps if not spec.is_service)
    sample: StepSpec = run.desired.steps[0]
    steps = [replace(sample, name=f"rollout_{index:03d}", node=node) for index, node in enumerate(nodes)]
    trainer = replace(trainer, gpus_per_node=2, cpus_per_task=4)
    run.desired = replace(run.desired, steps=(*steps, trainer, controller))
    write_desired(run.run, run.desired)


def test_an_instance_of_a_lost_node_goes_to_another_node_with_a_free_gpu() -> None:
    with world(MemoryRunner(nodes=3)) as run:
        spread(run, 1, 2)
        run.at(2.0, "lose", "node1")
        run.at(2.0, "rollout_000", killed("rollout_000"))
        finish(run, 10.0)

        assert run.supervise() is None
        assert run.runner.step("rollout_000").spec.node == 2
        assert list(excluded_nodes(run.run)) == ["node1"]


def test_a_lost_node_without_room_elsewhere_sends_the_run_to_other_nodes_from_a_checkpoint() -> None:
    with world(MemoryRunner(nodes=2)) as run:
        spread(run, 1, 1)
        run.at(2.0, "lose", "node1")
        run.at(2.0, "rollout_000", killed("rollout_000"))

        ending = run.supervise()

        assert isinstance(ending, Requeued)
        assert run.job.restarted == ["node_failure"]
        assert run.runner.step("trainer").verdict == Success({0: {"stopped_at": 7}})


def test_a_lost_node_shrinks_the_pool_where_fewer_instances_are_enough() -> None:
    with world(MemoryRunner(nodes=3)) as run:
        spread(run, 1, 2, 2)
        run.limits = Limits(min_instances=2)
        run.at(2.0, "lose", "node1")
        run.at(2.0, "rollout_000", killed("rollout_000"))
        finish(run, 10.0)

        assert run.supervise() is None
        assert list(given_up(run.run)) == ["rollout_000"]
        assert run.restarts_of("rollout_000") == []
        assert run.state()["steps"]["rollout_000"]["state"] == "lost"  # type: ignore[index]


def test_the_pool_does_not_shrink_below_its_least_size() -> None:
    with world(MemoryRunner(nodes=2)) as run:
        spread(run, 1, 1)
        run.limits = Limits(min_instances=2)
        run.at(2.0, "lose", "node1")
        run.at(2.0, "rollout_000", killed("rollout_000"))

        assert isinstance(run.supervise(), Requeued)


def test_a_trainer_whose_node_is_lost_goes_on_elsewhere() -> None:
    with world(MemoryRunner(nodes=2)) as run:
        run.at(2.0, "lose", "node0")
        run.at(2.0, "trainer", killed("trainer"))

        assert isinstance(run.supervise(), Requeued)
        assert run.job.restarted == ["node_failure"]


def test_a_lost_node_is_the_cause_where_the_run_may_not_go_on() -> None:
    with world(MemoryRunner(nodes=2)) as run:
        run.refusal = "enough is enough"
        run.at(2.0, "lose", "node0")
        run.at(2.0, "trainer", killed("trainer"))

        cause = run.supervise()

        assert isinstance(cause, Cause)
        assert (cause.step, cause.kind, cause.exit_code) == ("trainer", "node", 137)
        assert cause.message == "its node node0 failed: killed by SIGKILL; enough is enough"
