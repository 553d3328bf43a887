"""On a real Slurm: a launcher that is killed while sbatch answers, and a run that is ended before its supervisor is up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch import slurm
from launch.executors import submit
from launch.truth import tell_one
from stages.files import make_directory
from tests.fake_runs import fake_plan, fake_run, until
from tests.fake_stages import entry
from tests.people_kit import people, told
from tests.slurm_kit import slurm_config

pytestmark = pytest.mark.slurm

LIMIT_S = 20.0
LAUNCHER = """
import sys
from pathlib import Path
from launch.executors import submit
from launch.occupancy import launcher_mark
from stages.rundir import RunDir
from tests.fake_runs import fake_plan, fake_run
from tests.fake_stages import entry
from tests.slurm_kit import slurm_config
config, plan = slurm_config(), fake_plan("hetjob")
config.slurm.extra = ["--hold"]
run = fake_run(Path(sys.argv[1]), config, plan)
run.write(run.run_json, (run.read(run.run_json) or {}) | {"launcher": launcher_mark()})
submit(config, plan, run, entry=entry)
"""
SBATCH = """#!/bin/sh
case "$*" in *--test-only*) exec {sbatch} "$@";; esac
{sbatch} "$@"
kill -{signal} $PPID
"""


def submitted_by_a_launcher_that_dies(root: Path, folder: Path, signum: signal.Signals) -> int:
    """The launcher's exit status. Its sbatch submits, and then kills it."""
    make_directory(folder)
    (folder / "sbatch").write_text(SBATCH.format(sbatch=slurm_program("sbatch"), signal=signum.value))
    (folder / "sbatch").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(root)],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode


def slurm_program(name: str) -> str:
    found = [Path(folder) / name for folder in os.environ["PATH"].split(":") if (Path(folder) / name).is_file()]
    return str(found[0])


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_whose_launcher_was_killed_while_sbatch_answered_is_found_and_can_be_cancelled(
    tmp_path: Path, slurm_conf: Path, signum: signal.Signals
) -> None:
    root = tmp_path / "first light"

    assert submitted_by_a_launcher_that_dies(root, tmp_path / "programs", signum) == -signum

    found = tell_one(root)
    assert found.state == "pending"
    assert ("its launcher ended before" in found.why) is (signum == signal.SIGKILL)
    assert people("cancel", found.run).returncode == 0
    assert told(found.run) == ("failed", 1)
    assert slurm.fold(slurm.query(int(found.folder.job_id))).phase.is_over


def test_a_run_whose_set_up_never_ends_is_ended(tmp_path: Path, slurm_conf: Path) -> None:
    config, plan = slurm_config(), fake_plan("hetjob")
    config.launch.setup = ["sleep 600"]
    run = fake_run(tmp_path / "first light", config, plan)
    submission = submit(config, plan, run, entry=entry)
    until(lambda: tell_one(run.root).state == "starting", LIMIT_S, "the start of the job")

    done = people("cancel", run, "--checkpoint")

    assert done.returncode == 0
    assert "was ended before its supervisor reported" in done.stdout
    assert told(run) == ("failed", 1)
    until(lambda: slurm.fold(slurm.query(int(submission.job_id))).phase.is_over, LIMIT_S, "the end of the job")
