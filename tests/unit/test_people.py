"""What the commands for people share: they are listed, explain themselves, and end without a stack trace."""

from __future__ import annotations

import errno
import re
import subprocess
import sys

import pytest

from launch.errors import RunFailedError
from launch.help import COMMANDS, help_text
from launch.people import command
from launch.tree import HOUSE
from stages.files import DamagedRecordError

NAMES = re.findall(r"python -m (launch\.\w+)", COMMANDS)


def test_the_help_lists_every_command() -> None:
    assert set(NAMES) == {
        "launch.doctor",
        "launch.status",
        "launch.follow",
        "launch.logs",
        "launch.cancel",
        "launch.resume",
        "launch.list",
    }
    for name in NAMES:
        assert f"python -m {name}" in help_text(HOUSE)


@pytest.mark.parametrize("name", NAMES)
def test_a_command_explains_itself_and_its_exit_codes(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: python -m {name}")
    assert "xit code" in done.stdout


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("launch.list", "launch.doctor")])
def test_a_command_without_a_run_exits_2(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", name], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert "RUN" in done.stderr
    assert "Traceback" not in done.stderr


def fails(error: BaseException) -> int:
    def main() -> int:
        raise error

    return command(main)


def test_an_error_is_said_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(RunFailedError("the run failed: trainer: killed", 137)) == 137
    assert capsys.readouterr().err == "the run failed: trainer: killed\n"


def test_a_damaged_record_is_said_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(DamagedRecordError("state.json is not JSON")) == 1
    assert "state.json is not JSON" in capsys.readouterr().err


def test_a_full_disk_is_said_without_a_stack_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(OSError(errno.ENOSPC, "No space left on device", "cancel.json")) == 1
    assert "the system refused: [Errno 28] No space left on device" in capsys.readouterr().err


def test_a_command_without_a_standard_output_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)

    assert command(lambda: 0) == 0


def test_ctrl_c_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_what_is_a_fault_of_ours_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        fails(ZeroDivisionError())
