"""What a run holds on this machine while it runs, and whether all of it is gone afterwards: processes, ports, shared memory, nodes.

held = Belongings.of(run)      while it runs, as often as one likes (`note`)
held.assert_gone(env)          after its end
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launch.devcluster.commands import clean_env
from launch.steps import STEP_ID_VARIABLE
from stages.rundir import RunDir
from tests.fake_runs import processes_of, until

GONE_S = 15.0
"""From the end of a run to the last trace of it (issue: 15 s)."""
SHARED_MEMORY = "/dev/shm/"
_LISTENING = "0A"


@dataclass
class Belongings:
    """Of one run: listening ports and files in shared memory that its processes were seen to hold."""

    run: RunDir
    ports: set[int] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, run: RunDir) -> Belongings:
        held = cls(run)
        held.note()
        return held

    def note(self) -> None:
        for pid in pids_of(self.run):
            self.ports |= ports_of(pid)
            self.shared |= shared_memory_of(pid)

    def left(self) -> list[str]:
        """In words, what is still there."""
        open_ports = {port for ports in _listening().values() for port in [ports]}
        folder = Path(tempfile.gettempdir()) / f"libra-{os.geteuid()}-{self.run.run_id}"
        return [
            *processes_of(self.run),
            *(f"port {port}" for port in sorted(self.ports & open_ports)),
            *(name for name in sorted(self.shared) if Path(name).exists()),
            *(str(path) for path in Path(SHARED_MEMORY).glob(f"*{self.run.run_id}*")),
            *([str(folder)] if folder.exists() else []),
        ]

    def assert_gone(self, slurm_conf: Path | None = None) -> None:
        """Within GONE_S nothing of the run is left, and every node of the cluster is idle."""
        left: list[str] = []

        def is_gone() -> bool:
            left[:] = self.left() + (busy_nodes(slurm_conf) if slurm_conf else [])
            return not left

        try:
            until(is_gone, GONE_S, "the last trace of the run")
        except AssertionError as late:
            raise AssertionError(f"{late}; left: {left}") from None


def pids_of(run: RunDir) -> Iterator[int]:
    """Processes that carry a step id of the run."""
    wanted = f"{STEP_ID_VARIABLE}={run.run_id}.".encode()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and wanted in Path("/proc", name, "environ").read_bytes():
                yield int(name)
        except OSError:
            continue


def ports_of(pid: int) -> set[int]:
    """TCP ports that the process listens on."""
    listening = _listening()
    return {listening[inode] for target in _open_files(pid) if (inode := _inode(target)) in listening}


def shared_memory_of(pid: int) -> set[str]:
    """Files in shared memory that the process has open or mapped."""
    try:
        mapped = {
            line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if SHARED_MEMORY in line
        }
    except OSError:
        mapped = set()
    return {name for name in {*mapped, *_open_files(pid)} if name.startswith(SHARED_MEMORY)}


def _open_files(pid: int) -> Iterator[str]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue


def _inode(target: str) -> str:
    match = re.fullmatch(r"socket:\[(\d+)\]", target)
    return match[1] if match else ""


def _listening() -> dict[str, int]:
    """Inode -> port of every listening TCP socket on this machine."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == _LISTENING:
                found[cells[9]] = int(cells[1].rpartition(":")[2], 16)
    return found


def busy_nodes(slurm_conf: Path) -> list[str]:
    """Nodes of the private Slurm that are not idle."""
    environment: Mapping[str, str] = clean_env(slurm_conf)
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%N %T"], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    return [line for line in done.stdout.splitlines() if not line.endswith(" idle")]
