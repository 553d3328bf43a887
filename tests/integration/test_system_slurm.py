"""The demo as a heterogeneous job on the private Slurm: a whole run, and what happens when a process is killed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.devcluster.cluster import DevCluster
from tests.integration.test_system_local import kill_server, kill_stage, kill_supervisor
from tests.system_kit import DEATH_DEADLINE_S, SystemRun, launched, metrics

pytestmark = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.timeout(500)]
TOTAL_STEPS = 3
IDLE_DEADLINE_S = 15.0


def squeue(devcluster: DevCluster, *arguments: str) -> list[str]:
    done = subprocess.run(
        ["squeue", "-h", *arguments], env=devcluster.env(), capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.split()


def assert_the_queue_is_empty(devcluster: DevCluster) -> None:
    end = time.monotonic() + IDLE_DEADLINE_S
    while squeue(devcluster, "-o", "%i") and time.monotonic() < end:
        time.sleep(0.2)
    assert squeue(devcluster, "-o", "%i %T") == []


@pytest.fixture(scope="module")
def finished(devcluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[SystemRun, list[str]]:
    """A short run with two instances, and the job ids that squeue showed while it trained."""
    run_dir = tmp_path_factory.mktemp("slurm") / "run"
    overrides = ("cluster=devcluster", "rollout_gpus=2", f"total_steps={TOTAL_STEPS}", "task.test_size=50")
    with launched(run_dir, *overrides, env=devcluster.env()) as run:
        run.wait_for_step(0)
        jobs = squeue(devcluster, "-o", "%i")
        assert run.wait(300) == 0, run.output()
    return run, jobs


def test_squeue_shows_two_components_of_one_job(finished: tuple[SystemRun, list[str]]) -> None:
    _, jobs = finished

    assert len(jobs) == 2
    leader = jobs[0].partition("+")[0]
    assert sorted(jobs) == [f"{leader}+0", f"{leader}+1"]


def test_two_instances_acknowledged_every_version(finished: tuple[SystemRun, list[str]]) -> None:
    run, _ = finished

    for version in range(TOTAL_STEPS + 1):
        for instance in ("rollout_000", "rollout_001"):
            assert run.record(f"control/acks/v{version:06d}/{instance}.loaded.json")["version"] == version


def test_a_finished_job_reports_success_without_sacct_and_leaves_nothing(
    finished: tuple[SystemRun, list[str]], devcluster: DevCluster
) -> None:
    run, _ = finished

    assert run.record("attempts/0/state.json")["phase"] == "succeeded"
    assert run.record("summary.json")["steps"] == TOTAL_STEPS
    run.assert_nothing_is_left()
    assert_the_queue_is_empty(devcluster)


@pytest.mark.parametrize(
    ("kill", "wanted"),
    [
        (kill_stage("trainer"), "trainer: killed by SIGKILL"),
        (kill_supervisor, "supervisor"),
    ],
    ids=["trainer", "supervisor"],
)
def test_a_killed_process_ends_the_job_with_its_name_and_leaves_nothing(
    tmp_path: Path, devcluster: DevCluster, kill: Callable[[SystemRun], None], wanted: str
) -> None:
    overrides = ("cluster=devcluster", "total_steps=1000", "launch.evaluate=false")
    with launched(tmp_path / "run", *overrides, env=devcluster.env()) as run:
        run.wait_for_step(0)

        kill(run)

        assert run.wait(DEATH_DEADLINE_S) != 0
        assert wanted in run.output()
        run.assert_nothing_is_left()
    assert_the_queue_is_empty(devcluster)


def test_a_killed_server_is_replaced_and_a_killed_controller_goes_on(tmp_path: Path, devcluster: DevCluster) -> None:
    overrides = ("cluster=devcluster", "total_steps=1000", "launch.evaluate=false")
    with launched(tmp_path / "run", *overrides, env=devcluster.env()) as run:
        run.wait_for_step(0)

        kill_server(run)
        kill_stage("controller")(run)

        run.wait_until("another start of the instance", lambda: run.instance("rollout_000")["incarnation"] == 1)
        run.wait_until("another ledger", lambda: (run.run_dir / "ledger/attempt_000.1.jsonl").exists())
        run.wait_for_step(run.newest_step() + 3)
        assert run.dropped() <= {"interrupted"}
        subprocess.run(["scancel", run.record("attempts/0/state.json")["job_id"]], env=devcluster.env(), check=True)
        assert run.wait(2 * DEATH_DEADLINE_S) != 0
        run.assert_nothing_is_left()
    assert_the_queue_is_empty(devcluster)


def test_a_job_that_is_warned_of_its_limit_goes_on_from_its_checkpoint_and_ends_well(
    tmp_path: Path, devcluster: DevCluster
) -> None:
    overrides = ("cluster=devcluster", "total_steps=60", "launch.evaluate=false")
    with launched(tmp_path / "run", *overrides, env=devcluster.env()) as run:
        run.wait_for_step(1)
        job_id = run.record("attempts/0/state.json")["job_id"]

        subprocess.run(["scancel", "--batch", "--signal=USR1", job_id], env=devcluster.env(), check=True)

        run.wait_until("the end of the attempt", lambda: run.record("attempts/0/state.json")["phase"] == "requeued")
        saved = run.newest_checkpoint()
        assert saved >= 2
        run.wait_until("the next attempt", lambda: run.record("attempts/1/start.json"))
        assert (
            run.record("attempts/1/start.json")["step"]
            == run.record("attempts/1/attempt.json")["resumed_step"]
            == saved
        )
        assert run.wait(300) == 0, run.output()
        assert [line["step"] for line in metrics(run.run_dir) if "event" not in line] == list(range(60))
        assert run.record("summary.json")["attempts"] == 2
        run.assert_nothing_is_left()
    assert_the_queue_is_empty(devcluster)
