"""The environment that a nested sbatch, srun or stage may inherit.

Slurm's commands read their options from the environment, so what an outer job, step or shell left there changes what ours
do: an inherited SLURM_HET_SIZE breaks every srun, SLURM_CPU_BIND pins all ranks to few cores, SQUEUE_STATES hides jobs.
`sbatch --export=NONE` does not help (tried on 22.05).
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SBATCH_",
    "SALLOC_",
    "SQUEUE_",
    "SINFO_",
    "SACCT_",
    "SCONTROL_",
    "SCANCEL_",
    "PMI_",
    "PMI2_",
    "PMIX_",
    "SUBMITIT_",
)
NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
KEPT = frozenset({"SLURM_CONF"})
"""Without it the commands talk to another cluster, or to none."""


def is_foreign(name: str) -> bool:
    """Does `name` describe another job's place?"""
    return name not in KEPT and (name.startswith(PREFIXES) or name in NAMES)


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not is_foreign(name)}
