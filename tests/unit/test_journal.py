"""The supervisor's records where writing fails: for a moment, for long, at the last word, and for good."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from launch.journal import LAST_WORD_S, LASTING_S, Journal
from stages.rundir import FencedError, RunDir


class Disk:
    """`problem` is raised by every write; `refused` counts them. Time passes only as told, or as somebody sleeps."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = run
        self.problem: Exception | None = None
        self.now_s = 100.0
        self.mended_s = float("inf")
        write_record, write_bytes = RunDir.write, os.write
        monkeypatch.setattr(RunDir, "write", lambda *args: write_record(*args) if self.works() else None)
        monkeypatch.setattr(os, "write", lambda *args: write_bytes(*args) if self.is_fenced() or self.works() else 0)

    def is_fenced(self) -> bool:
        """An older attempt may still write to its own events."""
        return isinstance(self.problem, FencedError)

    def works(self) -> bool:
        if self.problem is not None and self.now_s < self.mended_s:
            raise self.problem
        return True

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def state(self) -> dict[str, Any]:
        return self.run.read(self.run.state_json) or {}

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.run.events_jsonl.read_text().splitlines()]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(RunDir.create(tmp_path / "run"), monkeypatch)


@pytest.fixture
def journal(disk: Disk) -> Journal:
    return Journal(disk.run, "local", "1", clock=lambda: disk.now_s, sleep=disk.sleep)


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_for_a_moment_ends_no_run_and_nothing_is_missing_afterwards(
    disk: Disk, journal: Journal
) -> None:
    journal.phase("running")
    disk.problem = FULL
    journal.event("restart", name="rollout_000")
    disk.now_s += LASTING_S - 1
    journal.beat()
    assert journal.trouble is None

    disk.problem = None
    disk.now_s += 5
    journal.beat()

    assert journal.trouble is None
    assert disk.events() == ["phase", "restart"]
    assert disk.state()["heartbeat"] == 3


def test_a_disk_that_stays_full_is_trouble(disk: Disk, journal: Journal) -> None:
    disk.problem = FULL
    journal.phase("running")

    disk.now_s += LASTING_S
    journal.beat()

    assert journal.trouble is FULL


def test_the_time_counts_from_the_first_failure_after_the_last_success(disk: Disk, journal: Journal) -> None:
    for _ in range(4):
        disk.problem = FULL
        journal.beat()
        disk.now_s += LASTING_S / 2
        disk.problem = None
        journal.beat()
        disk.now_s += 1

    assert journal.trouble is None


def test_a_newer_attempt_is_trouble_at_once(disk: Disk, journal: Journal) -> None:
    disk.problem = FencedError("attempt 0 is over")

    journal.phase("running")

    assert journal.trouble is disk.problem


def test_the_last_word_waits_for_room(disk: Disk, journal: Journal) -> None:
    disk.problem, disk.mended_s = FULL, disk.now_s + LAST_WORD_S / 2

    journal.phase("failed")
    journal.close()

    assert disk.state()["phase"] == "failed"
    assert disk.events() == ["phase"]


def test_the_last_word_is_not_waited_for_without_end(disk: Disk, journal: Journal) -> None:
    disk.problem = FULL
    journal.phase("failed")
    begin_s = disk.now_s

    journal.close()

    assert LAST_WORD_S <= disk.now_s - begin_s <= LAST_WORD_S + 1
