"""A launcher that ends between Slurm's acceptance of a job and the record of its number: nobody may say that nothing runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import pipeline, slurm, unrecorded
from launch.cancel import cancel
from launch.held_signals import HELD, held_signals
from launch.life import SlurmLife
from launch.occupancy import is_alive
from launch.resume import ResumeError, prepare
from launch.truth import tell_one
from stages.rundir import RunDir
from tests.fake_slurm import FakeSlurm, Job, short_looks, slurm_in_memory
from tests.made_runs import made, new_run, submitted

__all__ = ["short_looks", "slurm_in_memory"]
pytestmark = pytest.mark.usefixtures("slurm_in_memory", "short_looks")

SCRIPT = ".submission_file_0123456789abcdef.sh"


@pytest.fixture
def lost(tmp_path: Path) -> RunDir:
    """What is there when the launcher is killed while sbatch runs."""
    run = new_run(tmp_path / "run")
    (run.submitit / SCRIPT).write_text("#!/bin/bash\n")
    return run


def taken(state: str, where: str = "/somewhere/else") -> Job:
    return Job(state, "Resources", script=f"{where}/{SCRIPT}")


# ---- what is told --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shown", "wanted"), [("PENDING", "pending"), ("RUNNING", "starting")])
def test_a_job_that_no_launcher_wrote_down_is_found_and_said_to_be_useless(
    lost: RunDir, slurm_in_memory: FakeSlurm, shown: str, wanted: str
) -> None:
    slurm_in_memory.jobs[41] = taken(shown)

    found = tell_one(lost.root)

    assert (found.state, found.folder.job_id, found.folder.mode) == (wanted, "41", "slurm")
    assert "its launcher ended before it had written down job 41" in found.why


def test_a_job_that_slurm_did_not_take_has_vanished_with_its_launcher(lost: RunDir, slurm_in_memory: FakeSlurm) -> None:
    slurm_in_memory.jobs[41] = Job("PENDING", script="/somewhere/else/.submission_file_ffff.sh")

    found = tell_one(lost.root)

    assert (found.state, found.why) == ("vanished", "its launcher ended before anything was started")


def test_where_slurm_does_not_answer_nobody_says_that_nothing_was_started(
    lost: RunDir, slurm_in_memory: FakeSlurm
) -> None:
    slurm_in_memory.is_down = True

    found = tell_one(lost.root)

    assert found.state == "unknown"
    assert "did not answer" in found.why


def test_a_run_whose_launcher_did_not_come_to_sbatch_is_no_question_to_slurm(
    tmp_path: Path, slurm_in_memory: FakeSlurm
) -> None:
    run = new_run(tmp_path / "run")

    assert tell_one(run.root).state == "vanished"
    assert slurm_in_memory.calls == []


def test_a_job_that_is_written_down_is_not_looked_for(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run")
    (run.submitit / SCRIPT).write_text("#!/bin/bash\n")
    slurm_in_memory.jobs[41] = Job("PENDING")

    assert tell_one(run.root).why == ""
    assert not any(unrecorded.FORMAT in call for call in slurm_in_memory.calls)


def test_of_the_components_of_a_job_the_leader_counts(lost: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = f"60+1|/runs/first light/{SCRIPT}\n60+0|/runs/first light/{SCRIPT}\n61|(null)\n"
    monkeypatch.setattr(slurm, "command", lambda _words: lines)

    assert unrecorded.find([lost.submitit]) == {lost.submitit: "60"}


# ---- what people can do --------------------------------------------------------------------------------------------------


def test_it_can_be_cancelled(lost: RunDir, slurm_in_memory: FakeSlurm) -> None:
    slurm_in_memory.jobs[41] = taken("PENDING")

    words = cancel(lost.root, checkpoint=False, say=lambda _text: None, sleep=lambda _seconds: None)

    assert ["scancel", "41"] in slurm_in_memory.calls
    assert "job 41 was taken out of the queue" in words
    assert tell_one(lost.root).state == "failed"


def test_it_can_be_followed(lost: RunDir, slurm_in_memory: FakeSlurm) -> None:
    slurm_in_memory.jobs[41] = taken("PENDING")

    sign = SlurmLife().look(lost, {})

    assert sign.kind == "waiting"
    assert "job 41" in sign.words


def test_it_is_not_resumed_while_its_job_lives(lost: RunDir, slurm_in_memory: FakeSlurm) -> None:
    slurm_in_memory.jobs[41] = taken("PENDING")

    with pytest.raises(ResumeError, match="is pending, it cannot be resumed"):
        prepare(lost.root, [])


@pytest.mark.parametrize(("job", "wanted"), [(taken("PENDING"), True), (None, False)])
def test_its_directory_is_in_use_while_its_job_lives(
    lost: RunDir, slurm_in_memory: FakeSlurm, job: Job | None, wanted: bool
) -> None:
    slurm_in_memory.jobs = {41: job} if job else {}

    assert is_alive(lost, watch_s=0.0) is wanted


def test_its_directory_is_not_taken_where_slurm_does_not_answer(lost: RunDir, slurm_in_memory: FakeSlurm) -> None:
    slurm_in_memory.is_down = True

    assert is_alive(lost, watch_s=0.0)


def test_a_directory_of_another_host_s_launcher_that_never_came_to_sbatch_is_free(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", launcher={"host": "login7", "pid": 1, "started": "0"})

    assert not is_alive(run, watch_s=0.0)


def test_an_interrupted_sbatch_is_not_said_to_be_nothing(lost: RunDir) -> None:
    assert "launch.status" in pipeline.interrupted_words(lost)
    assert "which may go on" in pipeline.interrupted_words(lost)


def test_a_submission_that_was_interrupted_late_is_said_with_its_job(lost: RunDir) -> None:
    submitted(lost)

    assert pipeline.interrupted_words(lost).startswith("job 41 is submitted\n")


# ---- signals that wait ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", HELD)
def test_a_signal_is_obeyed_when_the_block_is_over(signum: signal.Signals) -> None:
    came: list[int] = []
    before = signal.signal(signum, lambda number, _frame: came.append(number))
    try:
        with held_signals():
            os.kill(os.getpid(), signum)
            inside = list(came)
    finally:
        signal.signal(signum, before)

    assert (inside, came) == ([], [signum])


def test_a_second_ctrl_c_does_not_wait() -> None:
    reached: list[str] = []

    def work() -> None:
        with held_signals():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("one")
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("two")

    with pytest.raises(KeyboardInterrupt):
        work()

    assert reached == ["one"]


def test_what_the_process_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with held_signals():
            during = signal.getsignal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)

    assert during is signal.SIG_IGN


def test_outside_the_main_thread_nothing_is_held() -> None:
    seen: list[Any] = []

    def look() -> None:
        with held_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    wanted: Callable[..., Any] | int | None = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10.0)

    assert seen == [wanted]
