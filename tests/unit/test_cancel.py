"""Ending a run: what is asked of whom, what is awaited, and what Ctrl-C does while a run is followed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import cancel as cancelling
from launch.cancel import CancelError, cancel, main, terminate
from launch.cancel_request import CancelRequest, CancelRequestError, me, read_cancel_request, write_cancel_request
from launch.runs import NotARunError
from launch.truth import tell_one
from stages.rundir import FencedError, RunDir
from stages.stopping import StopRequest, write_stop_request
from tests.fake_slurm import FakeSlurm, Job, running, short_looks, slurm_in_memory
from tests.made_runs import CAUSE, another_attempt, made, new_run, saved, says, submitted, take_away

__all__ = ["running", "short_looks", "slurm_in_memory"]
pytestmark = pytest.mark.usefixtures("slurm_in_memory", "short_looks")

CANCELLED = {"step": "supervisor", "kind": "cancelled", "message": "the run was cancelled by ada", "exit_code": 143}
SAVED = CANCELLED | {"message": "the run was cancelled by ada; its newest checkpoint is step_000007"}


class Ended:
    """`sleep` for `cancel`: one event happens at each call."""

    def __init__(self, *events: Callable[[], object]) -> None:
        self._events = list(events)

    def __call__(self, _seconds: float) -> None:
        if self._events:
            self._events.pop(0)()


def said_by(run: RunDir, *, checkpoint: bool, events: list[Callable[[], object]]) -> tuple[str, list[str]]:
    said: list[str] = []
    words = cancel(run.root, checkpoint=checkpoint, say=said.append, sleep=Ended(*events))
    return words, said


def ends(run: RunDir, **more: Any) -> Callable[[], None]:
    return lambda: says(run, "failed", cause=CANCELLED, **more)


# ---- the request ---------------------------------------------------------------------------------------------------------


def test_a_request_goes_round(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")

    write_cancel_request(run, CancelRequest(True, "ada@login1"))

    assert read_cancel_request(run) == CancelRequest(True, "ada@login1")
    assert "ada@login1" in CancelRequest(True, "ada@login1").reason


def test_a_request_is_for_one_attempt(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    write_cancel_request(run, CancelRequest(False, "ada"))
    later = another_attempt(run)

    assert read_cancel_request(later) is None
    with pytest.raises(FencedError):
        write_cancel_request(run, CancelRequest(False, "ada"))


@pytest.mark.parametrize("record", [{}, {"checkpoint": "yes", "by": "ada"}, {"checkpoint": True}])
def test_a_request_that_says_something_else_is_refused(tmp_path: Path, record: dict[str, Any]) -> None:
    run = new_run(tmp_path / "run")
    run.write(run.cancel_json, record)

    with pytest.raises(CancelRequestError, match=r"cancel\.json"):
        read_cancel_request(run)


def test_who_asks_is_known_by_user_and_host() -> None:
    assert me().endswith(f"@{socket.gethostname()}")


# ---- a running run -------------------------------------------------------------------------------------------------------


def test_a_running_run_is_asked_by_a_record_and_its_last_word_is_said(
    running: RunDir, slurm_in_memory: FakeSlurm
) -> None:
    words, _ = said_by(running, checkpoint=False, events=[lambda: None, ends(running)])

    assert read_cancel_request(running) == CancelRequest(False, me())
    assert "failed, supervisor: the run was cancelled by ada; it has no checkpoint" in words
    assert slurm_in_memory.asked("scancel") == 0


def test_a_checkpoint_is_awaited_and_named(running: RunDir) -> None:
    words, said = said_by(
        running,
        checkpoint=True,
        events=[
            lambda: write_stop_request(running, StopRequest("checkpoint", "cancelled", 95.0)),
            lambda: None,
            lambda: saved(running, 7),
            ends(running),
        ],
    )

    assert said == ["a checkpoint is being made, which may take 95 s"]
    assert "its newest checkpoint is that of step 7" in words


def test_a_checkpoint_that_the_supervisor_names_is_not_named_twice(running: RunDir) -> None:
    saved(running, 7)

    words, _ = said_by(running, checkpoint=False, events=[lambda: says(running, "failed", cause=SAVED)])

    assert words.count("newest checkpoint") == 1


def test_a_run_that_succeeds_meanwhile_has_succeeded(running: RunDir) -> None:
    words, _ = said_by(running, checkpoint=False, events=[lambda: says(running, "succeeded")])

    assert "has ended: succeeded" in words


def test_a_supervisor_that_does_not_react_gets_a_term(
    running: RunDir, slurm_in_memory: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "OBEY_S", 0.0)

    _, said = said_by(running, checkpoint=False, events=[lambda: None, lambda: None, ends(running)])

    assert slurm_in_memory.calls[-1] == ["scancel", "--batch", "--signal=TERM", "41"] or any(
        call[:3] == ["scancel", "--batch", "--signal=TERM"] for call in slurm_in_memory.calls
    )
    assert said == ["the supervisor does not react to the request; it gets a TERM"]


def test_a_supervisor_that_has_noted_the_stop_reacts_although_it_waits_for_slurm(
    running: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "OBEY_S", 0.0)
    says(running, "running", stop={"kind": "cancelled", "reason": "the run was cancelled by ada"})

    words, said = said_by(running, checkpoint=True, events=[lambda: None, ends(running)])

    assert "has ended: failed" in words
    assert said == []


def test_without_a_reaction_no_checkpoint_is_claimed(running: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancelling, "OBEY_S", 0.0)

    with pytest.raises(CancelError, match="does not react to the request; to end it without a checkpoint"):
        said_by(running, checkpoint=True, events=[])


def test_a_run_that_does_not_end_is_given_up_with_how_to_force_it(
    running: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "END_S", 0.3)

    with pytest.raises(CancelError, match="by force: scancel 41"):
        said_by(running, checkpoint=False, events=[])


# ---- in the queue --------------------------------------------------------------------------------------------------------


def test_a_waiting_job_is_taken_out_of_the_queue_by_its_leader(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run")
    slurm_in_memory.jobs[41] = Job("PENDING", "Resources")

    words, _ = said_by(run, checkpoint=False, events=[])

    assert ["scancel", "41"] in slurm_in_memory.calls
    assert "job 41 was taken out of the queue" in words


def test_a_checkpoint_of_a_waiting_job_is_nothing(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run")
    slurm_in_memory.jobs[41] = Job("PENDING", "Resources")

    _, said = said_by(run, checkpoint=True, events=[])

    assert "nothing to save" in said[0]


def test_a_requeued_run_is_cancelled_in_the_queue(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "requeued")
    saved(run, 4)
    slurm_in_memory.jobs[41] = Job("PENDING", "BeginTime")

    words, _ = said_by(run, checkpoint=False, events=[])

    assert "was taken out of the queue" in words


@pytest.mark.parametrize("phase", ["", "requeued"])
def test_a_job_whose_supervisor_has_not_come_up_is_ended_by_slurm(
    tmp_path: Path, slurm_in_memory: FakeSlurm, phase: str
) -> None:
    run = made(tmp_path / "run", phase)
    slurm_in_memory.jobs[41] = Job("RUNNING", nodes="node0")

    words, said = said_by(run, checkpoint=True, events=[])

    assert ["scancel", "41"] in slurm_in_memory.calls
    assert "job 41 was ended before its supervisor reported" in words
    assert "job 41 has just started, there is nothing to save" in said[0]
    assert tell_one(run.root).state == "failed"


def test_a_run_that_is_requeued_at_the_moment_of_the_request_is_cancelled_in_its_next_attempt(
    running: RunDir, slurm_in_memory: FakeSlurm
) -> None:
    def requeue() -> None:
        says(running, "requeued")
        slurm_in_memory.jobs[41] = Job("PENDING", "BeginTime")

    words, _ = said_by(running, checkpoint=False, events=[requeue])

    assert ["scancel", "41"] in slurm_in_memory.calls
    assert "job 41 was taken out of the queue" in words


def test_a_term_that_slurm_does_not_take_is_said(
    running: RunDir, slurm_in_memory: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "OBEY_S", 0.0)
    events: list[Callable[[], object]] = [lambda: setattr(slurm_in_memory, "is_down", True)]

    with pytest.raises(CancelError, match="the TERM did not reach the supervisor"):
        said_by(running, checkpoint=False, events=events * 3)


def test_a_living_run_that_has_lost_its_identity_is_named_with_it(running: RunDir) -> None:
    take_away(running, "run.json")

    with pytest.raises(CancelError, match=r"no request can be left for .*run\.json"):
        said_by(running, checkpoint=False, events=[])


# ---- nothing to end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "words"), [("succeeded", "succeeded"), ("failed", "killed by SIGKILL")])
def test_a_run_that_is_over_is_left_alone_and_said_to_be_over(tmp_path: Path, phase: str, words: str) -> None:
    run = made(tmp_path / "run", phase, cause=CAUSE if phase == "failed" else None)

    said, _ = said_by(run, checkpoint=False, events=[])

    assert "is over already" in said
    assert words in said
    assert not run.cancel_json.exists()


def test_a_run_of_which_nobody_knows_is_not_touched(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "running")
    slurm_in_memory.is_down = True

    with pytest.raises(CancelError, match="nobody can say whether"):
        said_by(run, checkpoint=False, events=[])


def test_no_run_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotARunError):
        main([str(tmp_path)])


# ---- local runs ----------------------------------------------------------------------------------------------------------


def test_a_term_goes_to_the_supervisor_and_to_nobody_else(tmp_path: Path) -> None:
    run = submitted(new_run(tmp_path / "run"), "local")
    code = "input()"
    with (
        subprocess.Popen([sys.executable, "-c", code, str(run.submitit)], stdin=subprocess.PIPE) as supervisor,
        subprocess.Popen([sys.executable, "-c", code, "another"], stdin=subprocess.PIPE) as stranger,
    ):
        try:
            says(run, "running", "local", host=socket.gethostname(), pid=stranger.pid)
            assert not terminate(run)
            says(run, "running", "local", host=socket.gethostname(), pid=supervisor.pid)
            assert terminate(run)
            assert supervisor.wait(20) == -signal.SIGTERM
            assert stranger.poll() is None
        finally:
            supervisor.kill()
            stranger.kill()


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1])
def test_a_number_that_is_no_process_gets_no_signal(tmp_path: Path, pid: int) -> None:
    run = made(tmp_path / "run", "running", "local", host=socket.gethostname(), pid=pid)

    assert not terminate(run)
