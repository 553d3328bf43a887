"""Find every process that belongs to one cluster, also those whose record was lost.

Slurm's step daemons (slurmstepd) and the tasks below them are not children of ours, and a task may have
left its process tree. They are recognised by their environment, which names the cluster, and are counted
only within this mount namespace: a container on this machine may use the same path for a cluster of its own.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from launch.devcluster.processes import PROC, Process, same_now
from launch.devcluster.topology import Site

# Put into the environment of munged, slurmctld and slurmd alone. Slurm hands it to nobody.
DAEMON_MARK = "LIBRA_DEVCLUSTER_DAEMON"


def find_members(root: Path) -> list[Process]:
    """Daemons, step daemons and tasks of the cluster in `root`, with everything that descends from them.

    Never contains this process or one of its ancestors, so that a job of the cluster may call it.
    """
    names = {pid: name for pid in _pids() if (name := _belongs(pid, root))}
    children = _children()
    todo = list(names)
    while todo:
        for child in children[todo.pop()]:
            if child not in names:
                names[child] = "descendant"
                todo.append(child)
    for ancestor in _self_and_ancestors():
        names.pop(ancestor, None)
    return [process for pid, name in sorted(names.items()) if (process := same_now(name, pid))]


def _belongs(pid: int, root: Path) -> str:
    """The role of process `pid` in the cluster, or "" when it has none or may not be looked at."""
    try:
        if os.readlink(PROC / str(pid) / "ns/mnt") != os.readlink(PROC / "self/ns/mnt"):
            return ""
        environ = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        command = (PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
    if f"{DAEMON_MARK}={root}".encode() in environ:
        return "daemon"
    if f"SLURM_CONF={Site.conf_in(root)}".encode() not in environ:
        return ""
    if command.startswith(b"slurmstepd:"):
        return "step daemon"
    # A user's shell has SLURM_CONF too, but only what slurmd started has the node's name.
    return "task" if any(entry.startswith(b"SLURMD_NODENAME=") for entry in environ) else ""


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def _parent(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _children() -> defaultdict[int, list[int]]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in _pids():
        children[_parent(pid)].append(pid)
    return children


def _self_and_ancestors() -> Iterator[int]:
    pid = os.getpid()
    while pid > 0:
        yield pid
        pid = _parent(pid)
