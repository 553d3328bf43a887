"""Bring the cluster up, look at it, and take it down without a trace."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launch.devcluster import programs
from launch.devcluster.commands import USABLE_STATES, ask, clean_env, job_ids, node_states
from launch.devcluster.daemons import dead, log_tails, start_all, wait_for_nodes, write_files
from launch.devcluster.errors import DevClusterError, DevClusterRequestError
from launch.devcluster.lock import exclusive, remove_parents
from launch.devcluster.members import find_members
from launch.devcluster.ports import free_ports
from launch.devcluster.processes import is_alive, stop, wait_until
from launch.devcluster.record import Record, read_record, write_record
from launch.devcluster.topology import Site, Topology, checked_root

LOCK_PATIENCE_S = 180.0
READY_PATIENCE_S = 60.0
# A job that ignores SIGTERM is killed after KillWait (5 s).
CANCEL_PATIENCE_S = 12.0
STOP_GRACE_S = 5.0
PORT_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class DevCluster:
    """A running cluster. `site` has its topology and ports."""

    site: Site

    @property
    def root(self) -> Path:
        return self.site.root

    @property
    def slurm_conf(self) -> Path:
        return self.site.slurm_conf

    @property
    def partition(self) -> str:
        return self.site.topology.partition

    @property
    def export_line(self) -> str:
        return f"export SLURM_CONF={self.slurm_conf}"

    def env(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment for commands on this cluster: `base` without any SLURM variable, plus SLURM_CONF."""
        return clean_env(self.slurm_conf, base)


@dataclass(frozen=True, slots=True)
class Status:
    """`daemons`: name -> whether it runs. `nodes` and `jobs` are empty when the controller does not answer."""

    root: Path
    daemons: dict[str, bool]
    nodes: dict[str, str]
    jobs: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        return bool(self.daemons) and all(self.daemons.values()) and bool(self.nodes)


def default_root() -> Path:
    """LIBRA_DEVCLUSTER_ROOT, else libra/devcluster in the user's cache folder."""
    if chosen := os.environ.get("LIBRA_DEVCLUSTER_ROOT"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "libra" / "devcluster"


def up(root: Path | None = None, nodes: int = 4, gpus_per_node: int = 2) -> DevCluster:
    """Return a cluster whose nodes are all idle; the one in `root` if it runs already with this shape.

    Several callers may ask at the same time: one starts it, the others get the same one. A cluster that
    lost a daemon (a crash, a reboot, a test) is removed with its jobs and started anew.

    Raises DevClusterRequestError, SlurmMissingError, or DevClusterError with the daemons' last log lines;
    after an error nothing of the cluster is left.
    """
    root = checked_root(root or default_root())
    topology = Topology(nodes=nodes, gpus_per_node=gpus_per_node)
    programs.ensure()
    with exclusive(root, LOCK_PATIENCE_S) as created_parents:
        record = read_record(root)
        if record is not None and record.complete and not dead(record):
            return _reuse(record, topology)
        if record is not None:
            _tear_down(record)
            created_parents = record.created_parents
        return _start_new(root, topology, created_parents)


def down(root: Path | None = None) -> bool:
    """Cancel the cluster's jobs, stop its processes, delete its folder. False when there was none.

    Raises DevClusterRequestError when the folder is not one that `up` made, DevClusterError when a
    process survives SIGKILL.
    """
    root = checked_root(root or default_root())
    if not root.parent.is_dir():
        return False
    with exclusive(root, LOCK_PATIENCE_S) as created_parents:
        record = read_record(root)
        if record is not None:
            _tear_down(record)
            created_parents = record.created_parents
        remove_parents(created_parents)
    return record is not None


def status(root: Path | None = None) -> Status | None:
    """None when there is no cluster in `root`."""
    root = checked_root(root or default_root())
    record = read_record(root)
    if record is None:
        return None
    daemons = {process.name: is_alive(process) for process in record.daemons}
    conf = record.site.slurm_conf
    if not daemons.get("slurmctld"):
        return Status(root, daemons, {}, ())
    try:
        return Status(root, daemons, node_states(conf), tuple(job_ids(conf)))
    except DevClusterError:
        return Status(root, daemons, {}, ())


def _reuse(record: Record, topology: Topology) -> DevCluster:
    running = record.site.topology
    if running != topology:
        raise DevClusterRequestError(
            f"a development cluster of {running.nodes} nodes with {running.gpus_per_node} GPUs runs in "
            f"{record.site.root}; wanted {topology.nodes} with {topology.gpus_per_node}. Stop it first "
            "(python -m launch.devcluster down) or give the new one its own --root"
        )
    conf = record.site.slurm_conf
    for name, state in node_states(conf).items():
        if state.startswith(("down", "drain")):
            ask(conf, "scontrol", "update", f"NodeName={name}", "State=RESUME")
    wait_for_nodes(record, USABLE_STATES, READY_PATIENCE_S)
    return DevCluster(record.site)


def _start_new(root: Path, topology: Topology, created_parents: tuple[Path, ...]) -> DevCluster:
    for attempt in range(1, PORT_ATTEMPTS + 1):
        root.mkdir(mode=0o700, exist_ok=True)
        controller_port, *node_ports = free_ports(1 + topology.nodes)
        record = Record(_site(root, topology, controller_port, tuple(node_ports)), (), created_parents)
        write_record(record)
        try:
            write_files(record.site)
            record = start_all(record, write_record)
            wait_for_nodes(record, frozenset({"idle"}), READY_PATIENCE_S)
        except BaseException as error:
            tails = log_tails(root)
            _tear_down(read_record(root) or record)
            port_was_taken = "Address already in use" in tails  # by somebody, between our look and the daemon's start
            if isinstance(error, DevClusterError) and port_was_taken and attempt < PORT_ATTEMPTS:
                continue
            remove_parents(created_parents)
            if not isinstance(error, DevClusterError):
                raise
            raise DevClusterError(f"the development cluster did not start: {error}\n{tails}") from error
        return DevCluster(record.site)
    raise AssertionError("the last attempt returns or raises")


def _site(root: Path, topology: Topology, controller_port: int, node_ports: tuple[int, ...]) -> Site:
    hostname = socket.gethostname().partition(".")[0]
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError as error:
        raise DevClusterRequestError(f"Slurm needs a user name, and user id {os.geteuid()} has none here") from error
    return Site(root, hostname, user, topology, controller_port, node_ports)


def _tear_down(record: Record) -> None:
    root = record.site.root
    if record.complete and not dead(record):
        _cancel_jobs(record.site.slurm_conf)
    stop(record.daemons, STOP_GRACE_S)
    stop(find_members(root), 0.0)
    survivors = find_members(root)
    if survivors:
        raise DevClusterError(f"these processes of {root} do not end: {survivors}; its folder is left for a look")
    shutil.rmtree(root)


def _cancel_jobs(slurm_conf: Path) -> None:
    """Give jobs their SIGTERM and KillWait. What remains is killed with the daemons, so failing here is no error."""
    with suppress(DevClusterError):
        if ids := job_ids(slurm_conf):
            ask(slurm_conf, "scancel", *ids)
            wait_until(lambda: not job_ids(slurm_conf), CANCEL_PATIENCE_S)
