"""The first node of an ordinary job dies, and with it the supervisor: the instances have the job run again.

On a cluster of its own, because a slurmd and all that it had started are killed.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.devcluster import cluster
from launch.devcluster.members import find_members
from launch.devcluster.record import read_record
from launch.devcluster.render import NODE_TIMEOUT_S
from tests.fake_runs import fake_plan, go
from tests.slurm_kit import AGAIN_S, SlurmRun, slurm_config

pytestmark = [pytest.mark.slurm, pytest.mark.patient, pytest.mark.timeout(400)]


@pytest.fixture
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[cluster.DevCluster]:
    with tempfile.TemporaryDirectory(prefix="libra-") as folder:
        running = cluster.up(Path(folder) / "slurm", nodes=3)
        monkeypatch.setenv("SLURM_CONF", str(running.slurm_conf))
        try:
            yield running
        finally:
            cluster.down(running.root)


def kill_node(running: cluster.DevCluster, node: str) -> None:
    """As if its power had gone: slurmd, its step daemons and everything below them, all at the same time.

    An srun that outlived its supervisor by a moment would still end its step on another node.
    """
    record = read_record(running.root)
    assert record is not None
    daemon = next(process for process in record.daemons if process.name == f"slurmd-{node}")
    doomed = {daemon.pid, *(member.pid for member in find_members(running.root) if _is_on(member.pid, node))}
    doomed |= {_parent(pid) for pid in doomed if _command(_parent(pid)).startswith("slurmstepd:")}
    while (
        below := {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) in doomed} - doomed
    ):
        doomed |= below
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in doomed:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue


def _is_on(pid: int, node: str) -> bool:
    try:
        return f"SLURMD_NODENAME={node}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def test_a_job_whose_first_node_dies_is_run_again_on_others(own_cluster: cluster.DevCluster, tmp_path: Path) -> None:
    told: dict[str, dict[str, Any]] = {"trainer": {"do": "train"}, "rollout_000": {"do": "serve", "watch": True}}
    run = SlurmRun(tmp_path / "run", fake_plan("single", train_gpus=2, rollout_node=1), told, slurm_config())
    first = run.state_of(0)["steps"]["trainer"]["hosts"][0]

    kill_node(own_cluster, first)

    run.await_attempt(1, deadline_s=3 * NODE_TIMEOUT_S + AGAIN_S)
    assert run.record(1)["reason"] == "node_failure"
    assert first not in {host for step in run.state_of(1)["steps"].values() for host in step["hosts"]}
    go(run.run)
    assert run.last_word(1)["phase"] == "succeeded"
    run.held.assert_gone()
