"""Ctrl-C while a run is followed: once, twice, and by somebody who does not stop pressing it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import detach
from launch.cancel_request import CancelRequest, me, read_cancel_request
from launch.errors import InterruptedRunError
from stages.rundir import RunDir
from tests.fake_slurm import running, short_looks, slurm_in_memory
from tests.made_runs import made

__all__ = ["running", "short_looks", "slurm_in_memory"]
pytestmark = pytest.mark.usefixtures("slurm_in_memory", "short_looks")


@pytest.fixture(autouse=True)
def ears(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The process of the tests goes on, and has to hear the next Ctrl-C."""
    shut: list[str] = []
    monkeypatch.setattr(detach, "deaf", lambda: shut.append("deaf"))
    return shut


def test_the_first_ctrl_c_leaves_the_run_alone_and_says_how_to_come_back(
    running: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InterruptedRunError) as caught:
        detach.interrupted(running, "slurm", sleep=lambda _seconds: None)

    assert caught.value.exit_code == 130
    assert "python -m launch.follow" in str(caught.value)
    assert "python -m launch.cancel" in str(caught.value)
    assert "detached; the job goes on" in capsys.readouterr().err
    assert not running.cancel_json.exists()


def ctrl_c(_seconds: float) -> None:
    raise KeyboardInterrupt


def test_the_second_ctrl_c_ends_the_run_with_a_checkpoint(running: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def fake(root: Path, *, checkpoint: bool, say: Callable[[str], None]) -> str:
        asked.append(checkpoint)
        return "it has ended"

    monkeypatch.setattr(detach, "cancel", fake)

    with pytest.raises(InterruptedRunError, match="it has ended"):
        detach.interrupted(running, "slurm", sleep=ctrl_c)

    assert asked == [True]


def test_the_third_ctrl_c_leaves_the_checkpoint_out(running: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def fake(root: Path, *, checkpoint: bool, say: Callable[[str], None]) -> str:
        asked.append(checkpoint)
        if checkpoint:
            raise KeyboardInterrupt
        return "it has ended"

    monkeypatch.setattr(detach, "cancel", fake)

    with pytest.raises(InterruptedRunError, match="it has ended"):
        detach.interrupted(running, "slurm", sleep=ctrl_c)

    assert asked == [True, False]


def test_who_follows_a_local_run_from_elsewhere_leaves_it_to_its_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", "running", "local", host=socket.gethostname(), pid=os.getpid())

    with pytest.raises(InterruptedRunError):
        detach.interrupted(run, "local", sleep=lambda _seconds: None)

    assert "goes on in the terminal that started it" in capsys.readouterr().err


def test_a_ctrl_c_at_the_very_end_of_the_wait_is_a_second_one(running: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detach, "deaf", lambda: ctrl_c(0.0))
    monkeypatch.setattr(detach, "cancel", lambda *_words, **_more: "it has ended")

    with pytest.raises(InterruptedRunError, match="it has ended"):
        detach.interrupted(running, "slurm", sleep=lambda _seconds: None)


def test_after_the_wait_nothing_cuts_off_how_to_come_back(running: RunDir, ears: list[str]) -> None:
    with pytest.raises(InterruptedRunError, match=r"launch\.follow"):
        detach.interrupted(running, "slurm", sleep=lambda _seconds: None)

    assert ears == ["deaf"]


def test_however_often_it_is_pressed_the_run_was_asked_to_end(
    running: RunDir, monkeypatch: pytest.MonkeyPatch, ears: list[str]
) -> None:
    def pressed_again(*_words: object, **_more: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(detach, "cancel", pressed_again)

    with pytest.raises(InterruptedRunError, match="was asked for and is not awaited"):
        detach.interrupted(running, "slurm", sleep=ctrl_c)

    assert read_cancel_request(running) == CancelRequest(False, me())
    assert ears == ["deaf"]


def test_a_process_that_is_about_to_end_does_not_hear_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    try:
        os.kill(os.getpid(), signal.SIGINT)
        detach.deaf()
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

    assert heard == [signal.SIGINT]
