"""No process of a server outlives the process that started it.

The kernel kills each one when the thread that started it ends (`stages.process.die_with_parent`). The setting survives
exec but not fork, so every process makes it for itself, as the first thing it does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from stages.process import ParentGoneError, die_with_parent
from stages.rollout.settings import SERVER_ID_VARIABLE

_forking_pid = 0


def bind_forks() -> None:
    """From now on processes forked by `os.fork` (multiprocessing's fork) die with the thread that forked them."""
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def bind_spawned(starter_environment: Callable[[int], dict[str, str]] | None = None) -> None:
    """For a process that multiprocessing spawned: it does not know its starter's pid, only that it has our mark."""
    die_with_parent()
    find = starter_environment or environment_of
    if find(os.getppid()).get(SERVER_ID_VARIABLE) != os.environ.get(SERVER_ID_VARIABLE):
        sys.exit("the process that spawned this one is gone")


def environment_of(pid: int) -> dict[str, str]:
    """The environment that `pid` was started with; empty when it is gone or not ours."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def marked_pids(server_id: str) -> list[int]:
    """Every living process that carries `server_id` in its environment; zombies do not count."""
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    return [pid for pid in pids if environment_of(pid).get(SERVER_ID_VARIABLE) == server_id and not _is_zombie(pid)]


def _is_zombie(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in ("Z", "X")


def _before_fork() -> None:
    global _forking_pid
    _forking_pid = os.getpid()


def _after_fork() -> None:
    try:
        die_with_parent(_forking_pid)
    except ParentGoneError:
        os._exit(1)
