"""What is around a run on a real Slurm: another run on the same nodes, and a log folder that cannot be written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import slurm
from launch.executors import submit
from tests.fake_runs import fake_plan, fake_run, go, processes_of, until
from tests.fake_stages import entry
from tests.slurm_kit import AGAIN_S, WORKING, SlurmRun, Start, set_nodes, slurm_config, slurm_runs

pytestmark = pytest.mark.slurm


@pytest.fixture
def start(tmp_path: Path, slurm_conf: Path) -> Iterator[Start]:
    with slurm_runs(tmp_path, slurm_conf) as starter:
        yield starter


@pytest.fixture
def pair(start: Start) -> tuple[SlurmRun, SlurmRun]:
    """Two runs on two nodes, with half of each."""
    set_nodes("DOWN", "node2", "node3")
    config = slurm_config()
    config.hardware.gpus_per_node, config.hardware.cpus_per_node = 1, 2
    config.slurm.mem_per_node_bytes = 2e8
    plan = fake_plan("hetjob", train_gpus=1, instances=1)
    return start(WORKING, plan=plan, config=config), start(WORKING, plan=plan, config=config)


def nodes_of(run: SlurmRun) -> list[str]:
    return [part.nodes for part in slurm.query(run.job_id)]


def test_two_runs_side_by_side_on_the_same_nodes_do_not_touch_each_other(pair: tuple[SlurmRun, SlurmRun]) -> None:
    killed, other = pair
    assert nodes_of(killed) == nodes_of(other) == ["node0", "node1"]
    beside = dict(other.pids)

    os.kill(killed.pids["trainer.0"], signal.SIGKILL)
    assert killed.end()[0] == "failed"

    assert all(f"/proc/{pid}" and Path(f"/proc/{pid}").exists() for pid in beside.values())
    go(other.run)
    assert other.end() == ("succeeded", "")
    assert other.events("restart") == []


def test_a_job_whose_log_folder_cannot_be_written_has_failed_in_words(tmp_path: Path, slurm_conf: Path) -> None:
    config = slurm_config()
    config.slurm.extra = ["--hold"]
    plan = fake_plan("hetjob", train_gpus=2)
    run = fake_run(tmp_path / "run", config, plan, {})
    submission = submit(config, plan, run, entry=entry)
    shutil.rmtree(run.logs)
    run.logs.write_text("in the way")

    slurm.command(["scontrol", "release", submission.job_id])
    until(lambda: submission.poll()[0] == "failed", AGAIN_S, "the end of the job")

    assert "logs/supervisor.log" in submission.poll()[1]
    status = [sys.executable, "-m", "launch.status", str(run.root)]
    told = subprocess.run(status, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 1
    assert "Traceback" not in told.stderr
    assert processes_of(run) == []
