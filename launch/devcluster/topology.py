"""What the cluster should look like, and where its parts lie: pure data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launch.devcluster.errors import DevClusterRequestError

# A unix socket's path is limited to 108 bytes (unix(7)); the longest one below the root is slurmstepd's
# "spool/node00/node00_1234567.4294967291".
MAX_ROOT_LENGTH = 65
# Slurm splits its own options at these characters, and "%" starts its file name patterns.
SAFE_ROOT = re.compile(r"/[A-Za-z0-9._/+@~-]+")
MAX_NODES = 64
MAX_GPUS_PER_NODE = 16


@dataclass(frozen=True, slots=True)
class Topology:
    """Equal nodes node0..nodeN-1 in one partition. Processors and memory are claims: Slurm hands them
    out without looking at the machine, so several nodes fit on two cores."""

    nodes: int = 4
    gpus_per_node: int = 2
    cpus_per_node: int = 4
    memory_per_node_mb: int = 8000
    partition: str = "dev"

    def __post_init__(self) -> None:
        limits = {
            "nodes": (self.nodes, 1, MAX_NODES),
            "gpus_per_node": (self.gpus_per_node, 0, MAX_GPUS_PER_NODE),
            "cpus_per_node": (self.cpus_per_node, 1, 1024),
            "memory_per_node_mb": (self.memory_per_node_mb, 100, 10_000_000),
        }
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise DevClusterRequestError(
                    f"a development cluster with {name}={value} is not possible: choose --{name.replace('_', '-')} "
                    f"from {low} to {high}"
                )

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node{index}" for index in range(self.nodes))


@dataclass(frozen=True, slots=True)
class Site:
    """One cluster on this machine: the folder that holds it, and what only the machine can tell.

    `hostname` is the short host name: slurmctld refuses to run under another. `node_ports` has one
    port per node, in the order of `topology.node_names`.
    """

    root: Path
    hostname: str
    user: str
    topology: Topology
    controller_port: int
    node_ports: tuple[int, ...]

    @staticmethod
    def conf_in(root: Path) -> Path:
        return root / "slurm.conf"

    @property
    def slurm_conf(self) -> Path:
        return self.conf_in(self.root)

    @property
    def munge_socket(self) -> Path:
        return self.root / "munge" / "socket"

    @property
    def munge_key(self) -> Path:
        return self.root / "munge" / "key"

    def fake_gpu(self, index: int) -> Path:
        return self.root / "gpus" / f"gpu{index}"


def checked_root(root: Path) -> Path:
    """The absolute form of `root`; raises DevClusterRequestError where Slurm could not use it."""
    absolute = root.expanduser().absolute()
    if not SAFE_ROOT.fullmatch(str(absolute)) or ".." in absolute.parts:
        raise DevClusterRequestError(
            f"the development cluster cannot live in {str(absolute)!r}: Slurm reads spaces, commas and other special "
            "characters in paths as its own syntax. Choose another folder with --root or LIBRA_DEVCLUSTER_ROOT"
        )
    if len(str(absolute)) > MAX_ROOT_LENGTH:
        raise DevClusterRequestError(
            f"the development cluster cannot live in {absolute}: {len(str(absolute))} characters leave no room for "
            f"socket names; at most {MAX_ROOT_LENGTH} are possible. Choose a shorter --root or LIBRA_DEVCLUSTER_ROOT"
        )
    return absolute
