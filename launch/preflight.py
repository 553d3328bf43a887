"""Asked of Slurm before a job is submitted: would it ever start, and when?

`sbatch --test-only` knows most. It does not see that the time limit is beyond the partition's (tried on 22.05: it estimates a
start for a job that then waits for ever), it says the same words for a cluster that is too small and for one with a node down,
and in some releases it fails for reasons of its own. So `sinfo` is asked too, and its answer explains.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from launch import slurm
from launch.hetjob import HetJobSpec
from launch.partitions import SINFO, Nodes, SubmitError, parse_sinfo, partition_problems, waiting_for
from launch.scrub import is_foreign, scrubbed

TEST_ONLY_TIMEOUT_S = 60.0
OPTIONS = (
    "slurm.partition, slurm.constraint, slurm.time_min, slurm.mem_per_node_bytes, hardware.cpus_per_node,"
    " hardware.gpus_per_node, train_gpus or rollout_gpus"
)
OPTION_OF = {
    "accounting/qos policy": "slurm.qos, slurm.account, slurm.time_min, train_gpus or rollout_gpus",
    "account/partition": "slurm.account or slurm.partition",
    "account": "slurm.account",
    "reservation": "slurm.reservation",
    "qos": "slurm.qos",
    "invalid partition": "slurm.partition",
    "this partition": "slurm.partition",
    "feature": "slurm.constraint",
    "license": "slurm.licenses",
    "wckey": "slurm.wckey",
    "time limit": "slurm.time_min",
    "node name": "slurm.exclude",
    "generic resource": "slurm.gpu_flag, slurm.gpu_type or hardware.gpus_per_node",
}
"""A word of Slurm's refusal (slurm/src/common/slurm_errno.c) -> what decides it; the first that occurs counts."""
REFUSAL = re.compile(r"allocation failure|submission failed|invalid|not permitted", re.IGNORECASE)
NOT_SLURMS_OPINION = re.compile(
    r"Unable to contact|Zero Bytes were transmitted|Socket timed out|Connection refused|did not answer", re.IGNORECASE
)
"""The controller did not look at the job at all."""
TOO_SMALL = "Requested node configuration is not available"


def check(spec: HetJobSpec, script: Path) -> list[str]:
    """What Slurm thinks of the job, as sentences for the user. Raises SubmitError when it can never start."""
    nodes = _nodes()
    waiting = _against(spec, nodes) if nodes else ""
    accepted, words = test_only(script)
    if accepted:
        return [
            *([f"the job will wait: {waiting}"] if waiting else []),
            *([f"sbatch --test-only: {words}"] if words else []),
        ]
    if waiting and TOO_SMALL in words:
        return [f"the job will wait: {waiting}"]
    if REFUSAL.search(words) and not NOT_SLURMS_OPINION.search(words):
        partitions = ", ".join(dict.fromkeys(place.partition for place in nodes))
        hint = f" (Slurm has {partitions})" if "partition" in words and partitions else ""
        raise SubmitError(
            f"Slurm cannot run this job; nothing was submitted: {words}{hint}; change {_options(words)};"
            " launch.dry_run=true shows the script"
        )
    return [f"sbatch --test-only gave no answer ({words or 'it said nothing'}); submitting all the same"]


def _options(words: str) -> str:
    return next((option for word, option in OPTION_OF.items() if word in words.lower()), OPTIONS)


def _nodes() -> list[Nodes]:
    try:
        return parse_sinfo(slurm.command(SINFO))
    except (slurm.SlurmCommandError, ValueError) as error:
        print(f"warning: the size of the cluster was not checked: {error}", file=sys.stderr, flush=True)
        return []


def _against(spec: HetJobSpec, nodes: list[Nodes]) -> str:
    """What the job has to wait for. Raises SubmitError."""
    try:
        found, waiting = partition_problems(spec, nodes), waiting_for(spec, nodes)
    except ValueError as error:
        raise SubmitError(f"{error}; change slurm.exclude") from error
    if found:
        raise SubmitError(f"Slurm cannot run this job; nothing was submitted: {'; '.join(found)}")
    return waiting


def sbatch_command(*arguments: str) -> list[str]:
    """sbatch without the variables of an outer job (an inherited SLURM_HET_SIZE breaks every srun of the new job)."""
    unset = [word for name in sorted(os.environ) if is_foreign(name) for word in ("-u", name)]
    return ["env", *unset, "sbatch", *arguments]


def test_only(script: Path) -> tuple[bool, str]:
    """(accepted, Slurm's words): "Job 64 to start at 2026-11-30T02:01:46 using 3 processors on node[0-1] ...".

    The estimate is for component 0 only.
    """
    try:
        done = subprocess.run(
            sbatch_command("--test-only", str(script)),
            capture_output=True,
            text=True,
            timeout=TEST_ONLY_TIMEOUT_S,
            env=scrubbed(os.environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"it did not answer within {TEST_ONLY_TIMEOUT_S:g} s"
    words = " ".join((done.stderr.strip() or done.stdout.strip()).split())
    return done.returncode == 0, re.sub(r"\b(sbatch: )(error: )?", "", words)
