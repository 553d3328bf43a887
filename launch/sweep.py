"""The last resort against leftovers: end every process on this host that carries a mark in its environment.

Only the mark decides, never a name. It reaches every descendant of a step, also those that left its process group or session
(double forks), which neither signals to the group nor Slurm's proctrack/linuxproc find. On hosts without the supervisor, Slurm's
cgroup tracking does the same at the end of a step.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from launch.steps import STEP_ID_VARIABLE

PROC = Path("/proc")


@dataclass(frozen=True)
class Leftover:
    pid: int
    command: str


def marked(prefix: str) -> list[Leftover]:
    """Processes of this user whose step id starts with `prefix`, without this process itself. Zombies have no environment."""
    wanted = f"{STEP_ID_VARIABLE}={prefix}".encode()
    pids = [int(name) for name in os.listdir(PROC) if name.isdigit() and int(name) != os.getpid()]
    return [Leftover(pid, _command(pid)) for pid in pids if _carries(pid, wanted)]


def sweep(prefix: str, deadline_s: float = 3.0) -> list[Leftover]:
    """Kill marked processes until none is left or the deadline has passed; returns those found at first.

    Repeated because a process may fork while being looked for.
    """
    found = first = marked(prefix)
    end = time.monotonic() + deadline_s
    while found and time.monotonic() < end:
        for leftover in found:
            _kill(leftover.pid, prefix)
        time.sleep(0.02)
        found = marked(prefix)
    return first


def _kill(pid: int, prefix: str) -> None:
    """Through a pidfd opened before the mark is read again, so a reused pid is never hit."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _carries(pid, f"{STEP_ID_VARIABLE}={prefix}".encode()):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def _carries(pid: int, wanted: bytes) -> bool:
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return any(entry.startswith(wanted) for entry in environment.split(b"\0"))


def _command(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()[:200]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
