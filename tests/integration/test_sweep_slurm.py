"""A sweep on a real Slurm: one job for each point, each with its own run directory, and nobody stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conf.load import load
from launch.devcluster.cluster import DevCluster
from stages.rundir import RunDir
from tests.fake_launch import make_model

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.slurm
def test_each_point_of_a_sweep_is_a_job_with_its_own_run_directory(devcluster: DevCluster, tmp_path: Path) -> None:
    """The jobs are held, so that nothing of them runs."""
    fixed = make_model(tmp_path / "model")
    swept = ["seed=1,2", f"launch.run_dir={tmp_path}/sweep", "slurm.extra=[--hold]"]

    done = subprocess.run(
        [sys.executable, "-m", "launch", "-m", *fixed, *swept],
        cwd=PROJECT,
        env=devcluster.env(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    runs = [RunDir.open(tmp_path / "sweep" / name, writer="test") for name in ("0_seed-1", "1_seed-2")]
    jobs = [str((run.read(run.submission_json) or {})["job_id"]) for run in runs]
    queued = subprocess.run(
        ["squeue", "--noheader", "--format=%A %T"],
        env=devcluster.env(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout.split("\n")
    assert all(f"{job} PENDING" in queued for job in jobs)
    assert [load(run.config_yaml).seed for run in runs] == [1, 2]
    assert all(f"{run.root}  {job}" in done.stdout for run, job in zip(runs, jobs, strict=True))
    subprocess.run(["scancel", *jobs], env=devcluster.env(), timeout=30, check=True)
