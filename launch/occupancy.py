"""May a new run take this directory? Refused while one lives there; moved aside only when asked."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.errors import ConfigError
from stages.files import DamagedRecordError, list_names
from stages.rundir import RunDir, RunDirectoryError, RunNotFoundError

HEARTBEAT_WATCH_S = 3.0
"""The supervisor's counter moves at least once a second; a counter that stands still this long has no supervisor."""


@contextmanager
def claimed(run_dir: Path, *, replace_finished: bool) -> Iterator[Path | None]:
    """Hold the name `run_dir` while a run is made there; yields where an earlier run was moved to, or None.

    The lock dies with its holder. Under it everything is looked at again, so of two launchers started at once one gets the
    directory and the other a ConfigError. Where flock does not reach other hosts, `RunDir.create` is the arbiter.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    taken = f"launch.run_dir={run_dir} is being taken by another launcher right now; choose another launch.run_dir"
    with name_lock(run_dir, taken):
        check_free(run_dir, replace_finished=replace_finished)
        yield take(run_dir) if replace_finished else None


@contextmanager
def name_lock(run_dir: Path, taken: str) -> Iterator[None]:
    """One launcher at a time may start something in `run_dir`. Raises ConfigError saying `taken` when another holds the lock."""
    lock = run_dir.with_name(f".{run_dir.name}.lock")
    with open(lock, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError([taken]) from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def launcher_mark() -> dict[str, Any]:
    """What run.json says about the process that makes the run, so that others can tell whether it still lives."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": process_start(os.getpid())}


def process_start(pid: int) -> str:
    """Clock ticks after boot at which `pid` started (proc(5), stat field 22); empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _launcher_lives(run: RunDir) -> bool:
    mark = (run.read(run.run_json) or {}).get("launcher") or {}
    if mark.get("host") != socket.gethostname():
        return False
    return bool(mark.get("started")) and process_start(int(mark["pid"])) == mark["started"]


def check_free(run_dir: Path, *, replace_finished: bool, watch_s: float = HEARTBEAT_WATCH_S) -> None:
    """Raises ConfigError when `run_dir` cannot be taken. Changes nothing."""
    if not run_dir.exists() or (run_dir.is_dir() and not any(run_dir.iterdir())):
        return
    if not run_dir.is_dir():
        raise ConfigError([f"launch.run_dir={run_dir} is a file; choose another launch.run_dir"])
    try:
        run = RunDir.open(run_dir, writer="launcher")
    except RunNotFoundError:
        raise ConfigError([f"launch.run_dir={run_dir} holds other files; choose another launch.run_dir"]) from None
    except (RunDirectoryError, DamagedRecordError) as error:
        raise ConfigError([_unreadable(run_dir, error)]) from error
    try:
        alive = is_alive(run, watch_s=watch_s)
    except DamagedRecordError as error:
        raise ConfigError([_unreadable(run_dir, error)]) from error
    if alive:
        raise ConfigError(
            [
                f"launch.run_dir={run_dir} is in use by a running job; choose another launch.run_dir, or stop that run first"
            ]
        )
    if not replace_finished:
        raise ConfigError(
            [
                f"launch.run_dir={run_dir} holds a run that is over; choose another launch.run_dir,"
                " or launch.replace_finished=true to move it aside"
            ]
        )


def _unreadable(run_dir: Path, error: Exception) -> str:
    return (
        f"launch.run_dir={run_dir} holds a run of which nobody can say whether it is over: {error};"
        " choose another launch.run_dir, or move it away when you know that it is"
    )


def is_alive(run: RunDir, *, watch_s: float, sleep: Callable[[float], None] = time.sleep) -> bool:
    """True while a supervisor's heartbeat moves (judged on this process's clock), or its job is still in the queue."""
    first = run.read(run.state_json)
    if first is not None and first.get("phase") in ("succeeded", "failed"):
        return False
    if first is None:
        return _launcher_lives(run) or _is_queued(run)
    deadline = time.monotonic() + watch_s
    while time.monotonic() < deadline:
        sleep(0.1)
        now = run.read(run.state_json)
        if now is not None and now.get("heartbeat") != first.get("heartbeat"):
            return now.get("phase") not in ("succeeded", "failed")
    return _is_here(run, first) or _is_queued(run)


def _is_here(run: RunDir, state: dict[str, Any]) -> bool:
    """Is the supervisor of `state` a process of this host, if only a stopped one?"""
    if state.get("host") != socket.gethostname():
        return False
    try:
        command = Path(f"/proc/{state['pid']}/cmdline").read_bytes()
    except OSError:
        return False
    return str(run.submitit).encode() in command.split(b"\0")


def _is_queued(run: RunDir) -> bool:
    """No supervisor reports: ask Slurm whether the submitted job still waits, or runs (it may be suspended)."""
    record = run.read(run.submission_json)
    if record is None:
        from launch.truth import tell_one
        from launch.unrecorded import scripts

        # A launcher that came as far as sbatch may have left a job, also where nobody can be asked.
        return bool(scripts(run.submitit)) and tell_one(run.root).state in ("pending", "starting", "running", "unknown")
    if record.get("mode") != "slurm":
        return False
    from launch.executors import reattach

    return reattach(run, record).poll()[0] in ("pending", "running")


def take(run_dir: Path) -> Path | None:
    """Move a run that is over to NAME.1, NAME.2, ... and return that; the caller has called `check_free`."""
    if not run_dir.exists() or not list_names(run_dir):
        return None
    taken = {name for name in list_names(run_dir.parent) if name.startswith(f"{run_dir.name}.")}
    number = next(n for n in range(1, len(taken) + 2) if f"{run_dir.name}.{n}" not in taken)
    aside = run_dir.with_name(f"{run_dir.name}.{number}")
    os.rename(run_dir, aside)
    return aside
