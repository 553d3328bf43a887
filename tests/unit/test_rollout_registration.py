"""An instance's heartbeat on a disk that is full."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from stages.files import wait_for
from stages.rollout import registration
from stages.rollout.registration import Registration
from stages.rundir import RunDir
from stages.weights.instances import read_status, write_status
from tests.weights_kit import as_writer, make_status

NAME = "rollout_000"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), NAME)


class FullDisk:
    """Refuses the writings from the second to the `last`-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: float, code: int = errno.ENOSPC) -> None:
        self.refused = 0
        numbers = itertools.count(1)

        def write(run: RunDir, status: Any) -> None:
            if 2 <= next(numbers) <= last:
                self.refused += 1
                raise OSError(code, os.strerror(code))
            write_status(run, status)

        monkeypatch.setattr(registration, "write_status", write)


def failed(beating: Registration) -> bool:
    try:
        beating.check()
    except OSError:
        return True
    return False


def test_a_disk_that_is_full_for_a_moment_ends_no_instance(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = FullDisk(monkeypatch, last=5)
    with Registration(run, make_status(NAME), interval_s=0.001, clock=lambda: 0.0) as beating:
        wait_for(
            lambda: ((status := read_status(run, NAME)) and status.heartbeat > 8) or None,
            deadline_s=10.0,
            awaited="heartbeats",
            from_whom="the thread",
        )
        beating.check()

    assert disk.refused == 4
    assert capsys.readouterr().out.count("No space left on device") == 1


def test_a_disk_that_stays_full_ends_the_instance(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, seconds = FullDisk(monkeypatch, last=float("inf")), itertools.count(0.0, 5.0)
    with Registration(run, make_status(NAME), interval_s=0.001, clock=lambda: next(seconds)) as beating:
        wait_for(lambda: failed(beating) or None, deadline_s=10.0, awaited="the failure", from_whom="the thread")

    assert disk.refused == 4  # at 0, 5, 10 and 15 s


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EROFS, errno.EACCES])
def test_any_other_failure_ends_it_at_once(run: RunDir, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    disk = FullDisk(monkeypatch, last=float("inf"), code=code)
    with Registration(run, make_status(NAME), interval_s=0.001, clock=lambda: 0.0) as beating:
        wait_for(lambda: failed(beating) or None, deadline_s=10.0, awaited="the failure", from_whom="the thread")

    assert disk.refused == 1
