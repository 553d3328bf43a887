"""Only the process that was recorded is ever stopped, and all of it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.devcluster.members import DAEMON_MARK, find_members
from launch.devcluster.processes import Process, is_alive, same_now, start_daemon, stop, wait_until

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)",
]


def started(argv: list[str], log: Path, **env: str) -> Process:
    """A daemon that has written its first line, so that its signal handlers are in place."""
    daemon = start_daemon("sleeper", argv, {**os.environ, **env}, log)
    assert wait_until(lambda: "up" in log.read_text(), 20.0)
    return daemon


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Process]:
    daemon = started(SLEEPER, tmp_path / "log")
    yield daemon
    assert stop([daemon], 1.0) == []


def test_a_running_daemon_is_alive(sleeper: Process) -> None:
    assert is_alive(sleeper)


def test_a_daemon_is_in_a_session_of_its_own(sleeper: Process) -> None:
    assert os.getsid(sleeper.pid) == sleeper.pid


def test_a_stopped_daemon_is_gone_although_its_parent_lives(sleeper: Process) -> None:
    assert stop([sleeper], 10.0) == []
    assert not is_alive(sleeper)
    assert same_now("zombie", sleeper.pid) is None


def test_a_daemon_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    daemon = started(STUBBORN, tmp_path / "log")

    assert stop([daemon], 0.1) == []
    assert not is_alive(daemon)


@pytest.mark.parametrize("other", [{"start_ticks": 1}, {"boot_id": "of-another-boot"}])
def test_a_process_that_only_has_the_same_number_is_left_alone(sleeper: Process, other: dict[str, Any]) -> None:
    stale = replace(sleeper, **other)

    assert not is_alive(stale)
    assert stop([stale], 0.1) == []
    assert is_alive(sleeper)


def test_members_are_marked_daemons_with_all_that_descends_from_them(tmp_path: Path) -> None:
    parent = f"import subprocess; subprocess.run({SLEEPER!r}, env={{}})"
    daemon = started([sys.executable, "-c", parent], tmp_path / "log", **{DAEMON_MARK: str(tmp_path)})

    members = find_members(tmp_path)
    stop(members, 5.0)

    assert [(member.pid == daemon.pid, member.name) for member in members] == [(True, "daemon"), (False, "descendant")]
    assert find_members(tmp_path) == []


def test_a_task_started_by_slurmd_is_a_member_but_the_users_shell_is_not(tmp_path: Path) -> None:
    conf = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    shell = started(SLEEPER, tmp_path / "shell.log", **conf)
    task = started(SLEEPER, tmp_path / "task.log", **conf, SLURMD_NODENAME="node0")

    members = {member.pid for member in find_members(tmp_path)}
    stop([shell, task], 5.0)

    assert members == {task.pid}


def test_a_member_that_asks_is_not_its_own_target(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from launch.devcluster.members import find_members; "
    code += "print(find_members(Path(sys.argv[1])))"
    env = {**os.environ, DAEMON_MARK: str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "[]"


def test_stopping_what_ended_by_itself_is_no_error(sleeper: Process) -> None:
    os.kill(sleeper.pid, signal.SIGKILL)

    assert stop([sleeper], 1.0) == []
