"""Our readers beside the Slurm that is installed: the same node lists, the same job, in the words of this release."""

from __future__ import annotations

import random
import subprocess

import pytest

from launch import slurm
from launch.devcluster.cluster import DevCluster
from launch.hostlist import expand_nodes

pytestmark = pytest.mark.slurm


def hostnames(nodelist: str, devcluster: DevCluster) -> list[str]:
    done = subprocess.run(
        ["scontrol", "show", "hostnames", nodelist],
        env=devcluster.env(),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.split()


def random_list(generator: random.Random) -> str:
    """Without text behind a bracket, which 22.05 does not know."""
    parts = []
    for _ in range(generator.randint(1, 3)):
        width = generator.randint(1, 4)
        items = []
        for _ in range(generator.randint(1, 3)):
            first = generator.randint(0, 110)
            last = first + generator.randint(0, 12)
            items.append(f"{first:0{width}d}-{last:0{width}d}" if last > first else f"{first:0{width}d}")
        parts.append(generator.choice(["n", "gpu-a", "r1n"]) + f"[{','.join(items)}]")
    return ",".join(parts)


def test_node_lists_are_expanded_as_scontrol_does(devcluster: DevCluster) -> None:
    generator = random.Random(0)

    for nodelist in [random_list(generator) for _ in range(40)]:
        assert expand_nodes(nodelist) == hostnames(nodelist, devcluster), nodelist


def test_a_job_is_known_from_its_submission_to_its_end(devcluster: DevCluster, slurm_conf: object) -> None:
    submitted = slurm.command(["sbatch", "--parsable", "-H", "-o", "/dev/null", "--mem=10", "--wrap", "exit 3"])
    job_id = int(submitted)

    [held] = slurm.query(job_id)
    slurm.command(["scontrol", "release", str(job_id)])
    slurm.command(["srun", "--dependency", f"afterany:{job_id}", "--mem=10", "true"], timeout_s=60.0)
    [ended] = slurm.query(job_id)

    assert (held.state, held.reason) == ("PENDING", "JobHeldUser")
    assert (ended.state, ended.exit_code) == ("FAILED", "3:0")
    assert slurm.query(job_id + 100_000) == []
