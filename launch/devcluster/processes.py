"""Daemons as (pid, start time) pairs, so that a number which the kernel gave to another process is never killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.devcluster.errors import DevClusterError

PROC = Path("/proc")
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """`start_ticks` is field 22 of /proc/PID/stat: clock ticks since boot when the process started."""

    name: str
    pid: int
    start_ticks: int
    boot_id: str


def boot_id() -> str:
    """Changes with every boot: start times of two boots do not compare."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def start_daemon(name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
    """Start `argv` in a session of its own, so that the terminal's Ctrl-C does not reach it."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/"
        )
    ticks = start_ticks(child.pid)
    if ticks is None:
        raise DevClusterError(f"{name} ended at once with exit code {child.wait(timeout=5)}")
    # Popen would warn when it is collected before the child's end; reap() below collects the child instead.
    child.returncode = 0
    return Process(name, child.pid, ticks, boot_id())


def start_ticks(pid: int) -> int | None:
    """None when there is no such process, or only its zombie."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name in field 2 may hold spaces and brackets: fields are counted after the last one.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def is_alive(process: Process) -> bool:
    return process.boot_id == boot_id() and start_ticks(process.pid) == process.start_ticks


def same_now(name: str, pid: int) -> Process | None:
    """The process that has this pid at this moment, or None."""
    ticks = start_ticks(pid)
    return None if ticks is None else Process(name, pid, ticks, boot_id())


def stop(processes: Iterable[Process], grace_s: float) -> list[Process]:
    """SIGTERM, up to `grace_s` for an orderly end, then SIGKILL. Returns those that live even so."""
    targets = list(processes)
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        targets = [process for process in targets if is_alive(process)]
        for process in targets:
            _send(process, number)
        wait_until(lambda: not any(is_alive(process) for process in targets), patience_s)  # noqa: B023 (used at once)
        reap(targets)
    return [process for process in targets if is_alive(process)]


def wait_until(condition: Callable[[], bool], patience_s: float) -> bool:
    """Whether `condition` became true within `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def reap(processes: Iterable[Process]) -> None:
    """Collect ended children of this very process; the other processes belong to somebody else."""
    for process in processes:
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            continue


def _send(process: Process, number: signal.Signals) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return  # ended between the check and the signal
