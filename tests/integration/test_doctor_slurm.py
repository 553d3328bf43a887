"""The doctor on the private Slurm, in its quick mode: what it finds, the profile, how it is interrupted, what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launch import slurm
from launch.compose import compose
from launch.devcluster.cluster import DevCluster
from launch.doctor.job import JOB_NAME
from launch.tree import tree_at
from tests.fake_runs import until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]

QUICK_LIMIT_S = 20.0
DOCTOR = (sys.executable, "-m", "launch.doctor", "--quick", "--json")


@dataclass
class Diagnosis:
    code: int
    said: str
    answer: dict[str, Any]
    took_s: float

    def status(self, name: str) -> str:
        (found,) = [finding["status"] for finding in self.answer["findings"] if finding["name"] == name]
        return str(found)

    def of(self, status: str) -> list[str]:
        return [f"{found['name']}: {found['seen']}" for found in self.answer["findings"] if found["status"] == status]


def diagnose(where: Path, *words: str) -> Diagnosis:
    started_s = time.monotonic()
    done = subprocess.run([*DOCTOR, *words], cwd=where, capture_output=True, text=True, timeout=120)
    took_s = time.monotonic() - started_s
    return Diagnosis(done.returncode, done.stderr, json.loads(done.stdout) if done.stdout else {}, took_s)


def doctors_jobs() -> list[str]:
    """Jobs of the doctor that are not over."""
    lines = slurm.command(["squeue", "-h", "-o", "%j|%i|%T"]).splitlines()
    return [line for line in lines if line.startswith(JOB_NAME)]


def processes_in(folder: Path) -> list[int]:
    """Processes with `folder` on their command line or in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a blank in its name: scripts and commands must be quoted right."""
    folder = tmp_path_factory.mktemp("doctor") / "my site"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def healthy(devcluster: DevCluster, place: Path) -> Diagnosis:
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(devcluster.slurm_conf)
    try:
        return diagnose(place, f"--partition={devcluster.partition}")
    finally:
        os.environ.pop("SLURM_CONF")
        if before is not None:
            os.environ["SLURM_CONF"] = before


def test_the_private_slurm_has_no_problem(healthy: Diagnosis) -> None:
    assert healthy.of("problem") == []
    assert healthy.code == 0
    assert healthy.answer["mode"] == "slurm"
    assert healthy.answer["nodes"] == ["node0", "node1"]


def test_it_takes_less_than_twenty_seconds(healthy: Diagnosis) -> None:
    assert healthy.took_s < QUICK_LIMIT_S


def test_what_only_nodes_can_tell_was_measured(healthy: Diagnosis) -> None:
    wanted = {
        "heterogeneous jobs": "ok",
        "a job": "ok",
        "nodes that answered": "ok",
        "import of launch and stages": "ok",
        "Python and pickling as here": "ok",
        "packages that a run needs": "ok",
        "--gpus-per-node=2": "ok",
        "--gpus-per-node=0": "ok",
        "steps side by side": "ok",
        "nodes reach one another": "ok",
        "seen by other nodes": "ok",
        "exclusive creation": "ok",
        "replacing a record": "ok",
        "clocks of the nodes": "ok",
    }
    assert {name: healthy.status(name) for name in wanted} == wanted
    assert healthy.status("the same code") in ("ok", "not tried"), "not tried where somebody edits it right now"


def test_what_is_fake_or_was_left_out_is_said(healthy: Diagnosis) -> None:
    assert healthy.status("GPUs") == "note", "no node shows a GPU, Slurm only counts them"
    assert healthy.status("a real heterogeneous job") == "not tried"
    assert healthy.status("vLLM start and reload") == "not tried"
    assert healthy.status("all-reduce") == "not tried"


def test_only_the_profile_is_left(healthy: Diagnosis, place: Path, slurm_conf: Path) -> None:
    assert healthy.code == 0
    assert {path.name for path in place.iterdir()} == {"libra_site"}
    assert doctors_jobs() == []
    assert processes_in(place) == []


def test_the_profile_composes_and_is_this_cluster(healthy: Diagnosis, place: Path) -> None:
    config = compose(["cluster=site"], tree_at(None, None, str(place / "libra_site")))

    assert (config.launch.mode, config.slurm.partition) == ("slurm", "dev")
    assert (config.hardware.gpus_per_node, config.hardware.cpus_per_node) == (2, 4)


def test_a_job_that_slurm_refuses_is_a_problem_with_its_words(tmp_path: Path, slurm_conf: Path) -> None:
    found = diagnose(tmp_path, "--nodes=9")

    assert found.code == 1
    assert [line for line in found.of("problem") if line.startswith("a job: sbatch refused")]
    assert "Requested node configuration is not available" in " ".join(found.of("problem"))
    assert doctors_jobs() == []


def test_an_interpreter_that_the_nodes_lack_is_named(tmp_path: Path, slurm_conf: Path) -> None:
    found = diagnose(tmp_path, "launch.python=/no/such/python")

    assert found.code == 1
    assert "/no/such/python" in " ".join(found.of("problem"))
    assert {path.name for path in tmp_path.iterdir()} == {"libra_site"}


def test_a_job_that_does_not_start_is_cancelled_and_nothing_is_claimed(
    tmp_path: Path, slurm_conf: Path, devcluster: DevCluster
) -> None:
    blocker = slurm.command(["sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 120"])
    try:
        until(lambda: slurm.fold(slurm.query(int(blocker))).state == "RUNNING", 30.0, "the job that blocks")

        found = diagnose(tmp_path, "--queue-wait=2")

        assert found.status("a job") == "not tried"
        assert found.status("GPUs") == "not tried"
        assert found.code == 0
        assert doctors_jobs() == []
    finally:
        slurm.cancel_job(int(blocker))
        until(lambda: slurm.fold(slurm.query(int(blocker))).phase.is_over, 30.0, "the end of the job that blocks")


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_an_interrupted_doctor_takes_its_job_along(
    tmp_path: Path, slurm_conf: Path, signum: signal.Signals, code: int
) -> None:
    doctor = subprocess.Popen([*DOCTOR], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running: Callable[[], bool] = lambda: any(line.endswith("RUNNING") for line in doctors_jobs())  # noqa: E731
    until(running, 30.0, "the doctor's job")

    doctor.send_signal(signum)
    _, said = doctor.communicate(timeout=60)

    assert doctor.returncode == code, said
    until(lambda: doctors_jobs() == [], 15.0, "the end of the doctor's job")
    assert list(tmp_path.iterdir()) == []
    until(lambda: processes_in(tmp_path) == [], 15.0, "the end of its processes")
