"""Start the daemons of one cluster, and wait until its nodes take work."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from launch.devcluster.commands import clean_env, node_states
from launch.devcluster.errors import DevClusterError
from launch.devcluster.members import DAEMON_MARK
from launch.devcluster.processes import Process, is_alive, start_daemon, wait_until
from launch.devcluster.programs import require
from launch.devcluster.record import Record
from launch.devcluster.render import render_gres_conf, render_slurm_conf
from launch.devcluster.topology import Site

MUNGE_PATIENCE_S = 20.0
LOG_TAIL_LINES = 8


def write_files(site: Site) -> None:
    """Folders, key, fake GPUs and configuration, readable by this user only."""
    for folder in ("munge", "state", "spool", "run", "log", "gpus"):
        (site.root / folder).mkdir(mode=0o700)
    for name in site.topology.node_names:
        (site.root / "spool" / name).mkdir(mode=0o700)
    _write_key(site.munge_key)
    for index in range(site.topology.gpus_per_node):
        _make_fake_gpu(site.fake_gpu(index))
    site.slurm_conf.write_text(render_slurm_conf(site))
    (site.root / "gres.conf").write_text(render_gres_conf(site))


def start_all(record: Record, on_start: Callable[[Record], None]) -> Record:
    """Start munged, slurmctld and one slurmd per node. `on_start` gets the record after every single
    start, so that whatever interrupts this, what was started is known."""
    site = record.site
    record = _start(record, "munged", _munged(site), on_start)
    if not wait_until(lambda: site.munge_socket.exists() or bool(dead(record)), MUNGE_PATIENCE_S) or dead(record):
        raise DevClusterError("munged did not open its socket")
    record = _start(record, "slurmctld", [require("slurmctld"), "-D", "-f", str(site.slurm_conf)], on_start)
    for name in site.topology.node_names:
        command = [require("slurmd"), "-D", "-f", str(site.slurm_conf), "-N", name]
        record = _start(record, f"slurmd-{name}", command, on_start)
    return record


def wait_for_nodes(record: Record, wanted: frozenset[str], patience_s: float) -> None:
    """Return when every node's state is among `wanted`. Raises DevClusterError on a dead daemon or too long a wait."""
    site = record.site
    states: dict[str, str] = {}

    def settled() -> bool:
        nonlocal states
        if dead(record):
            return True
        try:
            states = node_states(site.slurm_conf)
        except DevClusterError:
            return False  # the controller does not answer yet; the deadline decides
        return set(states) == set(site.topology.node_names) and set(states.values()) <= wanted

    in_time = wait_until(settled, patience_s)
    if names := [process.name for process in dead(record)]:
        raise DevClusterError(f"{', '.join(names)} ended while the cluster started")
    if not in_time:
        seen = ", ".join(f"{name} is {state}" for name, state in states.items()) or "the controller does not answer"
        raise DevClusterError(f"nodes are not ready after {patience_s:.0f} s: {seen}")


def dead(record: Record) -> list[Process]:
    return [process for process in record.daemons if not is_alive(process)]


def log_tails(root: Path) -> str:
    """The last lines that every daemon wrote, for an error message."""
    parts = []
    for path in sorted((root / "log").glob("*.out")):
        lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        if lines:
            parts.append("\n".join([f"--- {path.name}", *lines]))
    return "\n".join(parts) or "(no daemon wrote anything)"


def _start(record: Record, name: str, command: list[str], on_start: Callable[[Record], None]) -> Record:
    root = record.site.root
    env = clean_env(record.site.slurm_conf) | {DAEMON_MARK: str(root)}
    record = record.with_daemon(start_daemon(name, command, env, root / "log" / f"{name}.out"))
    on_start(record)
    return record


def _munged(site: Site) -> list[str]:
    folder = site.root / "munge"
    return [
        require("munged"),
        "--foreground",
        # munged wants every user to reach its socket; this one serves a single user, in a closed folder.
        "--force",
        f"--socket={site.munge_socket}",
        f"--key-file={site.munge_key}",
        f"--pid-file={folder / 'pid'}",
        f"--log-file={folder / 'log'}",
        f"--seed-file={folder / 'seed'}",
        "--num-threads=2",
    ]


def _write_key(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as key:
        key.write(secrets.token_bytes(128))


def _make_fake_gpu(path: Path) -> None:
    """Slurm numbers only character or block devices; a link to one counts, and unlike mknod needs no privilege."""
    path.symlink_to("/dev/null")
