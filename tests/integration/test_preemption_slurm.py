"""A job that is preempted: it goes on in its next attempt, from a checkpoint where the cluster warns the supervisor first.

On clusters of their own, where jobs of a second partition come first.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.devcluster import cluster
from launch.devcluster.render import render_slurm_conf
from launch.devcluster.topology import Site
from tests.fake_runs import fake_plan, go
from tests.fake_stages import STEPS_PER_ATTEMPT
from tests.slurm_kit import TRAINING, SlurmRun, slurm_config

pytestmark = [pytest.mark.slurm, pytest.mark.patient, pytest.mark.timeout(400)]

GRACE_S = 40
Up = Callable[[str], cluster.DevCluster]


@pytest.fixture
def cluster_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    with tempfile.TemporaryDirectory(prefix="libra-") as folder:
        root = Path(folder) / "slurm"

        def up(more: str) -> cluster.DevCluster:
            def preempting(site: Site) -> str:
                low = f"PartitionName=dev PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} "
                high = "PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP"
                text = render_slurm_conf(site).replace("PartitionName=dev ", low)
                return f"{text}PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n{high}\n{more}\n"

            monkeypatch.setattr("launch.devcluster.daemons.render_slurm_conf", preempting)
            running = cluster.up(root, nodes=2)
            monkeypatch.setenv("SLURM_CONF", str(running.slurm_conf))
            return running

        try:
            yield up
        finally:
            cluster.down(root)


@pytest.mark.parametrize(
    "more, saved",
    [("", 0), ("SlurmctldParameters=preempt_send_user_signal", STEPS_PER_ATTEMPT)],
    ids=["term", "signal"],
)
def test_a_preempted_job_goes_on_in_its_next_attempt(cluster_with: Up, tmp_path: Path, more: str, saved: int) -> None:
    running = cluster_with(more)
    run = SlurmRun(tmp_path / "run", fake_plan("hetjob", train_gpus=2), TRAINING, slurm_config())

    urgent = ["sbatch", "-p", "urgent", "-N2", "--gpus-per-node=2", "--time=1", "-o", "/dev/null", "--wrap", "sleep 1"]
    subprocess.run(urgent, env=running.env(), check=True, timeout=30)

    said = run.last_word(deadline_s=GRACE_S)
    assert (said["phase"], said["stop"]["kind"], said["next"]["how"]) == ("requeued", "preempted", "requeue")
    run.await_attempt(1)
    assert run.record(1)["reason"] == "requeue"
    assert run.started_from(1) == saved
    go(run.run)
    assert run.last_word(1)["phase"] == "succeeded"
    run.held.assert_gone(running.slurm_conf)
