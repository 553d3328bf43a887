"""A run's life on a real Slurm: what is replaced, what is started again, how it goes on in another attempt, and when it does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launch import slurm
from launch.exclusions import excluded_nodes
from planner.plan import Plan
from stages.members import given_up
from tests.fake_runs import fake_plan, go, until
from tests.fake_stages import STEPS_PER_ATTEMPT
from tests.slurm_kit import (
    AGAIN_S,
    LIMIT_S,
    SERVING,
    TRAINING,
    WORKING,
    SlurmRun,
    Start,
    jobs,
    set_nodes,
    slurm_config,
    slurm_runs,
)

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture
def start(tmp_path: Path, slurm_conf: Path) -> Iterator[Start]:
    with slurm_runs(tmp_path, slurm_conf) as starter:
        yield starter


def warn(run: SlurmRun) -> None:
    slurm.signal_batch(run.job_id, "USR1")


def spread(*nodes: int) -> Plan:
    """One ordinary job: the trainer on its first node, an instance on each of `nodes`, which have room for two."""
    plan = fake_plan("single", train_gpus=2, instances=len(nodes))
    placed = zip(plan.rollout.instances, nodes, strict=True)
    instances = tuple(replace(instance, node=node) for instance, node in placed)
    return replace(plan, rollout=replace(plan.rollout, instances=instances))


# ---- within an attempt ----------------------------------------------------------------------------------------------


def test_a_killed_instance_is_replaced_and_the_run_succeeds(start: Start) -> None:
    run = start(WORKING)

    os.kill(run.pids["rollout_001.0"], signal.SIGKILL)
    run.next_pid("rollout_001.0")
    go(run.run)

    assert run.end() == ("succeeded", "")
    (restart,) = run.events("restart")
    assert (restart["name"], restart["reason"]) == ("rollout_001", "killed by SIGKILL")
    assert run.slurms_verdict() == [("COMPLETED", "0:0"), ("COMPLETED", "0:0")]


def test_an_instance_that_is_killed_too_often_ends_the_job_with_its_own_code(start: Start) -> None:
    config = slurm_config()
    config.rollout.max_replacements = 1
    run = start(SERVING, config=config)

    os.kill(run.pids["rollout_001.0"], signal.SIGKILL)
    os.kill(run.next_pid("rollout_001.0"), signal.SIGKILL)

    word, reason = run.end()
    assert word == "failed"
    assert reason.startswith("rollout_001: killed by SIGKILL; it had been replaced 1 times")
    assert run.slurms_verdict()[0] == ("FAILED", "137:0")


def test_a_killed_controller_is_started_again_once_and_not_twice(start: Start) -> None:
    run = start(SERVING)

    os.kill(run.pids["controller.0"], signal.SIGKILL)
    os.kill(run.next_pid("controller.0"), signal.SIGKILL)

    assert run.end() == ("failed", "controller: killed by SIGKILL; it had been started again once")
    assert run.slurms_verdict()[0] == ("FAILED", "137:0")


def test_a_controller_that_was_started_again_ends_the_run_well(start: Start) -> None:
    run = start(WORKING)

    os.kill(run.pids["controller.0"], signal.SIGKILL)
    run.next_pid("controller.0")
    go(run.run)

    assert run.end() == ("succeeded", "")


# ---- from one attempt to the next -----------------------------------------------------------------------------------


def test_the_warning_before_the_limit_saves_requeues_and_the_next_attempt_goes_on(start: Start) -> None:
    run = start(TRAINING)

    warn(run)

    said = run.last_word()
    assert (said["phase"], said["cause"], said["next"]["how"]) == ("requeued", None, "requeue")
    assert run.run.published_checkpoints() == [STEPS_PER_ATTEMPT]
    run.await_attempt(1)
    assert run.record(1) | {"job_id": str(run.job_id), "resumed_step": 5, "reason": "requeue", "previous": 0} == (
        run.record(1)
    )
    assert run.started_from(1) == STEPS_PER_ATTEMPT
    go(run.run)
    assert run.last_word(1)["phase"] == "succeeded"
    until(lambda: slurm.fold(slurm.query(run.job_id)).phase.is_over, LIMIT_S, "the end of the job")
    assert run.slurms_verdict() == [("COMPLETED", "0:0"), ("COMPLETED", "0:0")]
    log = (run.at(1).logs / "supervisor.log").read_text()
    assert log.count("phase=running") == 2


@pytest.mark.patient
def test_a_job_that_reaches_its_limit_goes_on_in_its_next_attempt(start: Start) -> None:
    config = slurm_config()
    config.slurm.time_min = 2
    run = start(TRAINING, config=config)

    said = run.last_word(deadline_s=150.0)

    assert said["phase"] == "requeued"
    assert "the time limit is near" in said["reason"]
    assert run.run.published_checkpoints() == [STEPS_PER_ATTEMPT]
    run.await_attempt(1)
    assert run.started_from(1) == STEPS_PER_ATTEMPT


def test_a_node_that_goes_down_takes_a_hetjob_along_which_slurm_starts_again(start: Start) -> None:
    run = start(TRAINING)
    node = run.state_of(0)["steps"]["rollout_000"]["hosts"][0]

    set_nodes("DOWN", node)

    said = run.last_word()
    assert (said["phase"], said["stop"]["kind"], said["next"]["how"]) == ("requeued", "node_failure", "slurm")
    set_nodes("RESUME")
    run.await_attempt(1)
    assert run.record(1)["reason"] == "node_failure"
    go(run.run)
    assert run.last_word(1)["phase"] == "succeeded"


def test_what_older_attempts_left_is_not_acted_on(start: Start) -> None:
    run = start(TRAINING)
    old = run.at(0)
    old.write(old.instance_json("rollout_000"), {"state": "ready", "base_url": "http://127.0.0.1:1"})
    old.write(old.request_json(3), {"version": 3})

    warn(run)
    run.last_word()
    run.await_attempt(1)

    now = run.at(1)
    assert now.read(now.stop_json) is None
    assert now.read(now.instance_json("rollout_000")) is None
    assert now.read(now.request_json(3)) is None
    desired = now.read(now.desired_json)
    assert desired is not None
    assert (desired["phase"], desired["attempt"]) == ("run", 1)


def test_a_run_that_gets_nowhere_is_not_started_for_ever(start: Start) -> None:
    run = start({"trainer": {"do": "train", "saves": False}})

    warn(run)
    run.last_word()
    run.await_attempt(1)
    warn(run)

    said = run.last_word(1)
    assert said["phase"] == "failed"
    assert said["cause"]["exit_code"] == 124
    assert "no progress: since attempt 0 no checkpoint was saved beyond step 0" in said["cause"]["message"]
    until(lambda: slurm.fold(slurm.query(run.job_id)).phase.is_over, LIMIT_S, "the end of the job")
    assert run.slurms_verdict()[0] == ("FAILED", "124:0")


def test_where_requeueing_is_refused_another_job_follows(start: Start) -> None:
    run = start(TRAINING)
    slurm.command(["scontrol", "update", f"JobId={run.job_id}", "Requeue=0"])

    warn(run)

    said = run.last_word()
    assert (said["phase"], said["next"]["how"]) == ("requeued", "chain")
    following = int(said["next"]["job_id"])
    assert following != run.job_id
    run.await_attempt(1)
    assert run.record(1) | {"job_id": str(following), "resumed_step": 5, "reason": "chain", "previous": 0} == (
        run.record(1)
    )
    assert run.slurms_verdict()[0] == ("COMPLETED", "0:0")
    go(run.run)
    assert run.last_word(1)["phase"] == "succeeded"
    until(lambda: slurm.fold(slurm.query(following)).phase.is_over, LIMIT_S, "the end of the job")
    assert [part.state for part in slurm.query(following)] == ["COMPLETED", "COMPLETED"]


def test_a_run_that_shall_not_go_on_by_itself_ends_at_its_limit(start: Start) -> None:
    config = slurm_config()
    config.slurm.requeue = "never"
    run = start(TRAINING, config=config)

    warn(run)

    word, reason = run.end()
    assert word == "failed"
    assert "its newest checkpoint is step_000005; slurm.requeue=never" in reason
    assert run.slurms_verdict()[0] == ("FAILED", "124:0")
    assert jobs() == []


# ---- a node of an ordinary job --------------------------------------------------------------------------------------


def test_an_instance_of_a_lost_node_moves_to_another_and_the_run_succeeds(start: Start) -> None:
    more = {"rollout_002": {"do": "serve"}, "rollout_003": {"do": "serve"}}
    run = start({**WORKING, **more}, plan=spread(1, 2, 2, 3))
    steps = run.state_of(0)["steps"]
    lost, other = steps["rollout_000"]["hosts"][0], steps["rollout_003"]["hosts"][0]

    set_nodes("DOWN", lost)

    run.next_pid("rollout_000.0")
    assert run.state_of(0)["steps"]["rollout_000"]["hosts"] == [other]
    assert list(excluded_nodes(run.at(0))) == [lost]
    go(run.run)
    assert run.end() == ("succeeded", "")
    assert run.slurms_verdict() == [("COMPLETED", "0:0")]


def test_a_lost_node_shrinks_the_pool_where_fewer_instances_are_enough(start: Start) -> None:
    config = slurm_config()
    config.rollout.min_instances = 2
    run = start({**WORKING, "rollout_002": {"do": "serve"}}, plan=spread(1, 2, 2), config=config)
    lost = run.state_of(0)["steps"]["rollout_000"]["hosts"][0]

    set_nodes("DOWN", lost)

    until(lambda: given_up(run.at(0)), LIMIT_S, "an instance that was given up")
    assert list(given_up(run.at(0))) == ["rollout_000"]
    go(run.run)
    assert run.end() == ("succeeded", "")
    assert run.state_of(0)["steps"]["rollout_000"]["state"] == "lost"


def test_a_lost_node_without_room_elsewhere_requeues_the_job_without_that_node(start: Start) -> None:
    run = start(TRAINING, plan=spread(1, 1))
    lost = run.state_of(0)["steps"]["rollout_000"]["hosts"][0]

    set_nodes("DOWN", lost)

    said = run.last_word()
    assert (said["phase"], said["stop"]["kind"], said["next"]["how"]) == ("requeued", "node_failure", "requeue")
    assert run.run.published_checkpoints() == [STEPS_PER_ATTEMPT]
    set_nodes("RESUME")
    run.await_attempt(1)
    assert run.record(1)["reason"] == "node_failure"
    hosts = {host for step in run.state_of(1)["steps"].values() for host in step["hosts"]}
    assert lost not in hosts
    go(run.run)
    assert run.last_word(1, AGAIN_S)["phase"] == "succeeded"
