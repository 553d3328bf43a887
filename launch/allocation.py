"""The Slurm allocation that this shell has: batch script or salloc, not a step of it.

The environment says most. Slurm leaves out the GPUs when they were asked for as --gres, and --gpus=N may be spread unevenly;
`scontrol -d show job` tells what each node really gives (recorded from 22.05 in tests/unit/test_allocation.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import slurm
from launch.hostlist import expand_nodes
from launch.job_environment import AllocationError, JobEnvironment
from launch.partitions import parse_duration_s, parse_gres
from planner.given import Given, GivenNodes
from stages.files import list_names
from stages.rundir import RunDir, RunNotFoundError

STEP_MARK = "LIBRA_STEP_ID"
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""slurm.h: steps from here on are the batch script, the shell of salloc (LaunchParameters=use_interactive_step) and the like.

26.05 writes them as numbers below zero: -5 in the batch script, where 24.11 sets nothing."""

NOT_INSIDE = (
    "launch.mode=allocation: this shell is in no Slurm job (SLURM_JOB_ID is not set, or it is a step of one); start it in salloc or"
    " in a batch script, or use launch.mode=slurm"
)

Ask = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Held:
    """`restarts` is how often Slurm has run this job before; `limit_min` is None without a time limit.

    `is_batch`: the job ends with this shell, so the run and the job are one. In salloc the job outlives the run.
    """

    given: Given
    is_batch: bool
    restarts: int = 0
    limit_min: int | None = None
    partitions: tuple[str, ...] = ()
    account: str = ""
    qos: str = ""

    @property
    def job_id(self) -> str:
        return self.given.job_id


def is_inside(environ: Mapping[str, str]) -> bool:
    """Is this the shell of a job, and not a step: neither one of ours nor somebody's `srun --pty bash`? Raises AllocationError."""
    if not environ.get("SLURM_JOB_ID") or STEP_MARK in environ or "SUBMITIT_EXECUTOR" in environ:
        return False
    step = JobEnvironment(environ).step_id
    return step is None or step & 0xFFFFFFFF >= FIRST_SPECIAL_STEP


def held(environ: Mapping[str, str], ask: Ask = slurm.command) -> Held:
    """Raises AllocationError."""
    told = JobEnvironment(environ)
    job_id, suffixes = str(told.job_id()), told.components()
    records, trouble = _asked(job_id, ask)
    components = tuple(
        _component(told, suffix, records[index] if index < len(records) else None, trouble)
        for index, suffix in enumerate(suffixes)
    )
    leader = records[0].values if records else {}
    limit_s = parse_duration_s(leader.get("TimeLimit", ""))
    return Held(
        given=Given(job_id, components),
        is_batch=leader.get("BatchFlag", "") == "1" if leader else environ.get("ENVIRONMENT") == "BATCH",
        restarts=told.restarts,
        limit_min=None if limit_s is None else max(1, limit_s // 60),
        partitions=tuple(told.word(f"SLURM_JOB_PARTITION{suffix}") for suffix in suffixes),
        account=told.word("SLURM_JOB_ACCOUNT"),
        qos=told.word("SLURM_JOB_QOS"),
    )


def _asked(job_id: str, ask: Ask) -> tuple[list[JobRecord], str]:
    """What scontrol shows of each component, or why it shows nothing: the environment may be enough."""
    try:
        records = parse_job(ask(["scontrol", "-d", "-o", "show", "job", job_id]))
    except slurm.SlurmCommandError as error:
        return [], str(error)
    except ValueError as error:
        return [], f"what scontrol shows of job {job_id} cannot be read: {error}"
    return records, "" if records else f"scontrol shows nothing of job {job_id}"


# ---- what Slurm says ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobRecord:
    """One component as scontrol shows it; `gpus` by node."""

    values: Mapping[str, str]
    gpus: Mapping[str, int]


_NODE = re.compile(r"\sNodes=(\S+) CPU_IDs=\S+ Mem=\d+ GRES=(\S*)")


def parse_job(text: str) -> list[JobRecord]:
    """Lines of `scontrol -d -o show job J`, one record for each component, in their order."""
    records = []
    for line in text.splitlines():
        # Values may hold blanks (Comment=, Command=), even words like these; the real ones come first, hence reversed.
        values = dict(reversed(re.findall(r"(?:^|\s)([A-Za-z/]+)=(\S*)", line)))
        if "JobId" in values:
            gpus = {
                host: sum(count for _, count in parse_gres(gres))
                for names, gres in _NODE.findall(line)
                for host in expand_nodes(names)
            }
            records.append(JobRecord(values, gpus))
    return sorted(records, key=lambda record: int(record.values.get("HetJobOffset", 0)))


def _component(told: JobEnvironment, suffix: str, record: JobRecord | None, trouble: str) -> GivenNodes:
    hosts = told.hosts(suffix)
    if record is not None and record.gpus:
        gpus = min(record.gpus.get(host, 0) for host in hosts)
    else:
        gpus = _gpus(told, suffix, len(hosts), trouble)
    return GivenNodes(len(hosts), gpus, told.cpus_per_node(suffix))


def _gpus(told: JobEnvironment, suffix: str, num_hosts: int, trouble: str) -> int:
    """On each node, from the environment alone."""
    asked = told.gpus_per_node(suffix)
    if asked is not None:
        return asked
    here = told.count("SLURM_GPUS_ON_NODE", 0) if suffix in ("", "_HET_GROUP_0") else 0
    if here and num_hosts == 1:
        return here
    if trouble:
        raise AllocationError(
            f"how many GPUs the nodes of job {told.job_id()} give cannot be told: {trouble}; allocate them with --gpus-per-node"
        )
    return 0


# ---- a job that Slurm runs again ------------------------------------------------------------------------------------


def run_of_this_job(run_dir: Path, job_id: str, restarts: int) -> RunDir | None:
    """The run that this very job was running before Slurm took it back, opened at the attempt that the job began with.

    None for a first run, and for a directory that is none of this job's.
    """
    if not restarts:
        return None
    try:
        run = RunDir.open(run_dir, writer="launcher", attempt=0)
    except RunNotFoundError:
        return None
    numbers = sorted(int(name) for name in list_names(run.root / "attempts") if name.isdigit())
    for number in numbers:
        at = RunDir(run.root, run.run_id, number, "launcher")
        if f"{job_id}_submitted.pkl" in list_names(at.submitit):
            return at
    return None
