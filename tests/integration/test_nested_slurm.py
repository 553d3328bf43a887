"""Submitting from inside a Slurm job: the wrapper script, and a run whose launcher is itself a step of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_runs import fake_plan, fake_run, go, state, until
from tests.slurm_kit import slurm_config

pytestmark = pytest.mark.slurm

WRAPPER = Path(__file__).parents[2] / "launch" / "wrappers" / "libra-submit.sbatch"

LAUNCHER = """
import sys
from pathlib import Path
from launch.executors import submit
from stages.rundir import RunDir
from tests.fake_runs import fake_plan
from tests.fake_stages import entry
from tests.integration.test_supervisor_slurm import slurm_config
run = RunDir.open(Path(sys.argv[1]), writer="launcher")
print("submitted", submit(slurm_config(), fake_plan("hetjob"), run, entry=entry).job_id)
"""


def sbatch(*arguments: str, cwd: Path) -> None:
    """Run a job to its end. Raises CalledProcessError when it fails."""
    subprocess.run(
        ["sbatch", "--wait", *arguments],
        cwd=cwd,
        check=True,
        timeout=120,
        env={**os.environ, "LIBRA_PYTHON": sys.executable},
    )


def test_the_wrapper_plans_inside_a_job(tmp_path: Path, slurm_conf: Path) -> None:
    sbatch(str(WRAPPER), "+experiment=demo", "cluster=devcluster", "launch.dry_run=true", cwd=tmp_path)

    (log,) = tmp_path.glob("libra-launch-*.log")
    assert "#SBATCH hetjob" in log.read_text()


def test_the_wrapper_fails_with_the_launchers_message(tmp_path: Path, slurm_conf: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        sbatch(str(WRAPPER), "+experiment=demo", "train_gpuz=1", cwd=tmp_path)

    (log,) = tmp_path.glob("libra-launch-*.log")
    assert "train_gpus" in log.read_text()


def test_a_run_submitted_from_a_step_of_a_hetjob_starts_its_own_steps(tmp_path: Path, slurm_conf: Path) -> None:
    run = fake_run(tmp_path / "run", slurm_config(), fake_plan("hetjob"))
    go(run)
    script = tmp_path / "outer.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --ntasks=1 --mem=500M --time=5\n#SBATCH hetjob\n#SBATCH --ntasks=1 --mem=500M\n"
        f'srun --mpi=none "{sys.executable}" "{tmp_path}/launcher.py" "{run.root}"\n'
    )
    (tmp_path / "launcher.py").write_text(LAUNCHER)

    sbatch(str(script), cwd=tmp_path)

    until(lambda: state(run).get("phase") in ("succeeded", "failed"), 60.0, "the end of the nested run")
    assert state(run)["phase"] == "succeeded", state(run)["cause"]
