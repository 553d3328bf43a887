"""Where a run lives: nodes that it shares with another run, and a log folder that its job cannot write."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import slurm
from launch.executors import submit
from stages.rollout.node_folder import node_folder_path
from tests.fake_runs import fake_plan, fake_run, go, processes_of, until
from tests.fake_stages import entry
from tests.leftovers import Belongings
from tests.people_kit import people
from tests.slurm_kit import LIMIT_S, SERVING, WORKING, SlurmRun, Start, slurm_config, slurm_runs

pytestmark = pytest.mark.slurm


@pytest.fixture
def start(tmp_path: Path, slurm_conf: Path) -> Iterator[Start]:
    with slurm_runs(tmp_path, slurm_conf) as starter:
        yield starter


def shared_start(start: Start, behaviours: dict[str, dict[str, str]]) -> SlurmRun:
    """On nodes 0 and 1, of which it takes half."""
    config = slurm_config()
    config.slurm.exclude = "node[2-3]"
    return start(behaviours, plan=fake_plan("hetjob", train_gpus=1, instances=1), config=config)


def hosts(run: SlurmRun) -> dict[str, list[str]]:
    return {name: step["hosts"] for name, step in run.state_of(0)["steps"].items()}


def test_two_runs_side_by_side_on_one_node_do_not_touch_each_other(start: Start) -> None:
    first, second = shared_start(start, SERVING), shared_start(start, WORKING)
    assert hosts(first) == hosts(second)
    untouched = dict(second.pids)

    os.kill(first.pids["rollout_000.0"], signal.SIGKILL)
    first.next_pid("rollout_000.0")
    os.kill(first.pids["trainer.0"], signal.SIGKILL)

    assert first.end() == ("failed", "trainer: killed by SIGKILL")
    first.held.assert_gone()
    assert second.state_of(0)["phase"] == "running"
    assert second.events("restart") == []
    assert len(processes_of(second.run)) >= len(untouched)
    assert all(Path(f"/proc/{pid}").exists() for pid in untouched.values())
    assert node_folder_path(second.run.run_id).exists()
    go(second.run)
    assert second.end() == ("succeeded", "")


def test_a_job_that_cannot_write_its_log_folder_is_a_failure_that_says_so(tmp_path: Path, slurm_conf: Path) -> None:
    """Somebody removes it while the job waits; a folder that root cannot write does not exist."""
    block = ["sbatch", "--parsable", "--exclusive", "-N4", "--time=5", "-o", "/dev/null", "--wrap", "sleep 300"]
    blocker = int(subprocess.run(block, capture_output=True, text=True, check=True, timeout=30).stdout)
    try:
        config, plan = slurm_config(), fake_plan("hetjob")
        run = fake_run(tmp_path / "run", config, plan)
        submission = submit(config, plan, run, entry=entry)
        run.write(run.submission_json, {"mode": "slurm", "job_id": submission.job_id})
        shutil.rmtree(run.logs)
    finally:
        slurm.cancel_job(blocker)

    until(lambda: submission.poll()[0] == "failed", LIMIT_S, "the end of the job")
    said = people("status", run)

    assert submission.poll()[1].startswith(
        "supervisor: component 0 is FAILED, Slurm could not write the job's log on its node"
    )
    assert submission.exit_code == 1
    assert said.returncode == 1
    assert "Slurm could not write the job's log" in said.stdout
    assert "missing or damaged: attempts/0/logs/ (missing)" in said.stdout
    Belongings.of(run).assert_gone(slurm_conf)
