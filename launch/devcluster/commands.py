"""Short Slurm commands against one cluster, each with a deadline."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from launch.devcluster.errors import DevClusterError
from launch.devcluster.programs import require

DEADLINE_S = 20.0
FOREIGN_PREFIXES = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SCANCEL_", "SQUEUE_", "SINFO_")
# Node states (sinfo %T) in which a node takes work or does it. A suffix such as "*" (does not respond) is not among them.
USABLE_STATES = frozenset({"idle", "mixed", "allocated", "completing"})


def clean_env(slurm_conf: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """`base` (default: this process's environment) for commands on this cluster, whatever Slurm the caller is in."""
    source = os.environ if base is None else base
    env = {name: value for name, value in source.items() if not name.startswith(FOREIGN_PREFIXES)}
    return {**env, "SLURM_CONF": str(slurm_conf)}


def ask(slurm_conf: Path, program: str, *arguments: str) -> str:
    """Standard output of one command. Raises DevClusterError when it fails or takes too long."""
    try:
        done = subprocess.run(
            [require(program), *arguments],
            env=clean_env(slurm_conf),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise DevClusterError(f"{program} {' '.join(arguments)} did not answer within {DEADLINE_S:.0f} s") from error
    if done.returncode != 0:
        raise DevClusterError(f"{program} {' '.join(arguments)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def node_states(slurm_conf: Path) -> dict[str, str]:
    """Node name -> state word, as `sinfo` prints it."""
    lines = ask(slurm_conf, "sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
    return {name: state for name, state in (line.split() for line in lines)}


def job_ids(slurm_conf: Path) -> list[str]:
    """Ids of everything that is pending or running; a heterogeneous job appears once per component."""
    return ask(slurm_conf, "squeue", "--noheader", "--format=%A").split()
