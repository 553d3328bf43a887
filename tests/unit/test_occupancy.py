"""Who may take a run directory."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import occupancy
from launch.errors import ConfigError
from stages.rundir import RunDir


def test_a_missing_or_empty_directory_is_free(tmp_path: Path) -> None:
    occupancy.check_free(tmp_path / "new", replace_finished=False)
    occupancy.check_free(tmp_path, replace_finished=False)


def test_a_directory_with_other_files_is_refused_even_with_replace(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")

    with pytest.raises(ConfigError, match="holds other files"):
        occupancy.check_free(tmp_path, replace_finished=True)


def test_a_finished_run_is_refused_unless_asked_to_replace(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.write(run.state_json, {"phase": "succeeded", "heartbeat": 1})

    with pytest.raises(ConfigError, match=r"launch\.replace_finished=true"):
        occupancy.check_free(run.root, replace_finished=False)
    occupancy.check_free(run.root, replace_finished=True)


def test_a_running_run_is_refused_even_with_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path / "run")
    counter = itertools.count()
    real_read = RunDir.read

    def read_with_heartbeat(self: RunDir, path: Path, *, any_attempt: bool = False) -> dict[str, Any] | None:
        if path == run.state_json:
            return {"phase": "running", "heartbeat": next(counter)}
        return real_read(self, path, any_attempt=any_attempt)

    monkeypatch.setattr(RunDir, "read", read_with_heartbeat)

    with pytest.raises(ConfigError, match="in use by a running job"):
        occupancy.check_free(run.root, replace_finished=True)


def test_a_crashed_run_whose_heartbeat_stands_still_may_be_replaced(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.write(run.state_json, {"phase": "running", "heartbeat": 7})

    occupancy.check_free(run.root, replace_finished=True, watch_s=0.2)


def test_a_supervisor_that_is_stopped_still_has_its_directory(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", "input()", str(run.submitit)], stdin=subprocess.PIPE) as stopped:
        state = {"phase": "running", "heartbeat": 7, "host": socket.gethostname(), "pid": stopped.pid}
        run.write(run.state_json, state)
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            with pytest.raises(ConfigError, match="in use by a running job"):
                occupancy.check_free(run.root, replace_finished=True, watch_s=0.2)
        finally:
            stopped.kill()


def test_a_job_that_slurm_still_has_keeps_its_directory_although_its_supervisor_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path / "run")
    run.write(run.submission_json, {"mode": "slurm", "job_id": "7"})
    run.write(run.state_json, {"phase": "running", "heartbeat": 7, "host": "another", "pid": 1})
    monkeypatch.setattr("launch.executors.reattach", lambda *_: SimpleNamespace(poll=lambda: ("running", "suspended")))

    with pytest.raises(ConfigError, match="in use by a running job"):
        occupancy.check_free(run.root, replace_finished=True, watch_s=0.2)


@pytest.mark.parametrize("record", ["run.json", "attempts/0/state.json", "attempts/0/submission.json"])
@pytest.mark.parametrize("damage", ['{"phase": "runn', "[]", "\xff"])
def test_a_run_with_a_damaged_record_is_refused_by_the_name_of_the_record(
    tmp_path: Path, record: str, damage: str
) -> None:
    run = RunDir.create(tmp_path / "run")
    (run.root / record).write_bytes(damage.encode("latin-1"))

    with pytest.raises(ConfigError, match=record):
        occupancy.check_free(run.root, replace_finished=True, watch_s=0.2)


def test_a_run_of_another_layout_is_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.run_json.write_text('{"schema_version": 99, "run_id": "x"}')

    with pytest.raises(ConfigError, match="has layout 99"):
        occupancy.check_free(run.root, replace_finished=True)


def test_a_run_whose_launcher_lives_is_in_use_before_its_supervisor_has_reported(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", extra={"launcher": occupancy.launcher_mark()})

    with pytest.raises(ConfigError, match="in use by a running job"):
        occupancy.check_free(run.root, replace_finished=True)


def test_a_run_whose_launcher_died_before_its_supervisor_reported_may_be_replaced(tmp_path: Path) -> None:
    gone = occupancy.launcher_mark() | {"started": "1"}
    run = RunDir.create(tmp_path / "run", extra={"launcher": gone})

    occupancy.check_free(run.root, replace_finished=True)


def test_of_two_launchers_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    target = tmp_path / "run"

    with occupancy.claimed(target, replace_finished=True):
        with pytest.raises(ConfigError, match="by another launcher right now"):
            with occupancy.claimed(target, replace_finished=True):
                pass

    assert list(tmp_path.iterdir()) == []


def test_a_claim_moves_nothing_unless_asked(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.write(run.state_json, {"phase": "succeeded", "heartbeat": 1})

    with pytest.raises(ConfigError, match="holds a run that is over"):
        with occupancy.claimed(run.root, replace_finished=False):
            pass
    with occupancy.claimed(run.root, replace_finished=True) as aside:
        assert aside == tmp_path / "run.1"


def test_taking_moves_old_runs_aside_and_never_over_each_other(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    for mark in ("first", "second"):
        target.mkdir()
        (target / mark).write_text("")
        occupancy.take(target)

    assert (tmp_path / "demo.1" / "first").exists()
    assert (tmp_path / "demo.2" / "second").exists()
    assert not target.exists()
