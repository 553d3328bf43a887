"""What other users of the cluster can see of a job, on the private Slurm: command lines, the job's record, its files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import slurm
from launch.devcluster.cluster import DevCluster
from launch.pipeline import new_token
from stages.files import write_bytes_atomic
from tests.fake_runs import go, processes_of
from tests.slurm_kit import SlurmRun, slurm_runs

pytestmark = pytest.mark.slurm

MADE_BY_TESTS = {"fake.json"}
SECRET = new_token()


@pytest.fixture(scope="module")
def seen(devcluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SlurmRun, str]]:
    """A run that was submitted under an open umask, and what anybody could read of it while it ran."""
    before = os.umask(0)
    with (
        pytest.MonkeyPatch.context() as patch,
        slurm_runs(tmp_path_factory.mktemp("run"), devcluster.slurm_conf) as start,
    ):
        patch.setenv("SLURM_CONF", str(devcluster.slurm_conf))
        try:
            run = start()
            write_bytes_atomic(run.run.token_file, SECRET)
            public = "\n".join(processes_of(run.run))
            public += slurm.command(["scontrol", "-o", "show", "job", str(run.job_id)])
            public += slurm.command(["scontrol", "-o", "show", "step"])
            go(run.run)
            assert run.end() == ("succeeded", "")
        finally:
            os.umask(before)
        yield run, public


def test_what_everybody_sees_of_a_job_holds_no_token(seen: tuple[SlurmRun, str]) -> None:
    _, public = seen

    assert "submitit.core._submit" in public
    assert "JobState=RUNNING" in public
    assert "StepId=" in public
    assert SECRET.decode().strip() not in public


def test_the_token_is_in_no_file_but_its_own(seen: tuple[SlurmRun, str]) -> None:
    root = seen[0].run.root
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]

    holding = [str(path.relative_to(root)) for path in files if SECRET.strip() in path.read_bytes()]

    assert {"job.sbatch", "config.yaml"} <= {path.name for path in files}
    assert holding == ["token"]


def test_every_file_and_folder_of_a_run_is_closed_to_others(seen: tuple[SlurmRun, str]) -> None:
    root = seen[0].run.root
    paths = [root, *(path for path in root.rglob("*") if path.name not in MADE_BY_TESTS and not path.is_symlink())]

    assert any(path.suffix == ".out" or path.suffix == ".log" for path in paths)
    assert any(path.suffix == ".pkl" for path in paths)
    assert [f"{path} {stat.S_IMODE(path.stat().st_mode):04o}" for path in paths if path.stat().st_mode & 0o077] == []


def test_no_link_of_a_run_leads_out_of_it(seen: tuple[SlurmRun, str]) -> None:
    root = seen[0].run.root
    links = [path for path in root.rglob("*") if path.is_symlink()]

    assert [str(path) for path in links if not Path(os.path.realpath(path)).is_relative_to(root.resolve())] == []
