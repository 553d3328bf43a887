"""A run inside the allocation of this shell: signals that are passed on, and where its launcher's part ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from conf.site import LaunchConfig
from launch import again
from launch.allocation import Held
from launch.errors import LibraError
from launch.inside import PASSED_ON, AllocationSubmission, SupervisorProcess, start_inside
from launch.life import HandedOverError
from planner.given import Given, GivenNodes
from stages.files import list_names
from stages.rundir import RunDir
from tests.fake_runs import until

HEARS = """
import signal, sys, time
def hear(number, frame):
    print(signal.Signals(number).name, flush=True)
for name in ("USR1", "TERM"):
    signal.signal(getattr(signal, f"SIG{name}"), hear)
print("listening", flush=True)
time.sleep(60)
"""


def where(*, is_batch: bool = True, restarts: int = 0) -> Held:
    return Held(Given("52", (GivenNodes(1, 2, 4),)), is_batch, restarts)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """The handlers of this process as they were."""
    before = {signum: signal.getsignal(signum) for signum in [*PASSED_ON, signal.SIGCONT]}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def submission(run: RunDir, held: Held) -> AllocationSubmission:
    process = subprocess.Popen(["true"])
    process.wait(10)
    return AllocationSubmission(run, SupervisorProcess("52", process), held)


@pytest.mark.parametrize("signum", list(PASSED_ON))
def test_what_slurm_tells_the_shell_reaches_the_supervisor(
    run: RunDir, tmp_path: Path, undisturbed: None, signum: signal.Signals
) -> None:
    python = tmp_path / "python"
    (tmp_path / "hears.py").write_text(HEARS)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/hears.py"\n')
    python.chmod(0o700)
    log = run.logs / "supervisor.log"
    started = start_inside(run, str(python), where())
    until(lambda: "listening" in log.read_text(), 30.0, "the child")
    try:
        os.kill(os.getpid(), signum)

        wanted = PASSED_ON[signum].name
        until(lambda: wanted in log.read_text(), 10.0, wanted)
    finally:
        assert isinstance(started.job, SupervisorProcess)
        started.job.process.kill()
        started.job.process.wait(10)


def test_the_supervisor_knows_that_it_is_in_a_slurm_job(run: RunDir, tmp_path: Path, undisturbed: None) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$SUBMITIT_EXECUTOR $*"\n')
    python.chmod(0o700)

    started = start_inside(run, str(python), where())

    assert isinstance(started.job, SupervisorProcess)
    started.job.process.wait(10)
    assert (run.logs / "supervisor.log").read_text() == f"slurm -u -m submitit.core._submit {run.submitit}\n"


def test_a_batch_job_and_its_run_are_one_while_salloc_goes_on(run: RunDir) -> None:
    assert submission(run, where(is_batch=True)).mode == "slurm"
    assert submission(run, where(is_batch=False)).mode == "allocation"
    assert submission(run, where()).is_own


def test_the_launcher_has_no_part_in_what_comes_after_its_attempt(run: RunDir) -> None:
    life = submission(run, where()).life()
    later = RunDir(run.root, run.run_id, 1, "test")

    for seen, state in ((run, {"phase": "requeued"}), (later, {})):
        with pytest.raises(HandedOverError, match=r"python -m launch\.follow"):
            life.look(seen, state)


def test_an_attempt_before_its_own_is_no_end(run: RunDir) -> None:
    """A job that runs again sees the last word of the attempt before, until its supervisor has begun the next."""
    life = submission(run, where(restarts=1)).life()

    assert life.look(run, {"phase": "requeued"}).kind in ("running", "over")


@pytest.mark.parametrize(
    ("attempts", "phase", "said"),
    [([0], "succeeded", "has ended well already"), ([0, 1], "running", "has got attempt 1 from somebody else")],
)
def test_a_job_that_runs_again_leaves_a_run_alone_that_needs_it_no_more(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    attempts: list[int],
    phase: str,
    said: str,
) -> None:
    (run.submitit / "52_submitted.pkl").touch()
    for number in attempts[1:]:
        run.start_attempt(number)
    newest = RunDir(run.root, run.run_id, attempts[-1], "supervisor")
    newest.write(newest.state_json, {"phase": phase})
    monkeypatch.setattr(again, "is_inside", lambda environ: True)
    monkeypatch.setattr(again, "held", lambda environ: where(restarts=1))

    class Prepared:
        run_dir = run.root
        config = LibraConfig(launch=LaunchConfig(mode="allocation"))

    try:
        assert again.go_on(Prepared(), lambda *_: None)  # type: ignore[arg-type]
        words = capsys.readouterr().out
    except LibraError as error:
        words = str(error)

    assert said in words
    assert "supervisor.log" not in list_names(run.logs), "nothing was started"
