"""The private Slurm, for real: a heterogeneous job through it, and nothing left of it afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.devcluster import cluster
from launch.devcluster.commands import job_ids, node_states
from launch.devcluster.daemons import start_all
from launch.devcluster.errors import DevClusterError, DevClusterRequestError
from launch.devcluster.members import find_members
from launch.devcluster.ports import free_ports, is_free
from launch.devcluster.processes import is_alive, wait_until
from launch.devcluster.record import Record, read_record

pytestmark = pytest.mark.slurm

HETJOB = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=1 --gpus-per-node=1 --mem=500 --time=5 --output={folder}/job.log
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=2 --gpus-per-node=2 --mem=500
run() {{ srun --het-group=$1 --ntasks=1 --cpus-per-task=1 --mpi=none bash -c "$2"; }}
run 0 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES > {folder}/trainer' & trainer=$!
run 1 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES > {folder}/rollout; exit 7' & rollout=$!
wait $trainer && wait $rollout
"""
# Ignores SIGTERM, leaves its own process group, and keeps a child of its own.
STUBBORN = """\
#!/bin/bash
#SBATCH --ntasks=1 --mem=100 --output=/dev/null
trap '' TERM
(setsid bash -c "trap '' TERM; sleep 300" &)
touch {folder}/running
sleep 300
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path where a test may start a cluster of its own; it must be gone at the end."""
    with tempfile.TemporaryDirectory(prefix="libra-") as folder:
        yield Path(folder) / "made" / "slurm"
        cluster.down(Path(folder) / "made" / "slurm")
        assert list(Path(folder).iterdir()) == []


def sbatch(running: cluster.DevCluster, script: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    path = folder / "job.sh"
    path.write_text(script.format(folder=folder))
    return subprocess.run(
        ["sbatch", "--parsable", *options, str(path)],
        env=running.env(),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def record_of(root: Path) -> Record:
    record = read_record(root)
    assert record is not None
    return record


def test_a_hetjob_runs_on_two_nodes_with_its_gpus_and_ends_with_the_scripts_exit_code(
    devcluster: cluster.DevCluster, tmp_path: Path
) -> None:
    done = sbatch(devcluster, HETJOB, tmp_path, "--wait")

    assert done.returncode == 7, done.stderr + (tmp_path / "job.log").read_text()
    trainer_node, *trainer_gpus = (tmp_path / "trainer").read_text().split()
    rollout_node, *rollout_gpus = (tmp_path / "rollout").read_text().split()
    assert trainer_node != rollout_node
    assert (trainer_gpus, rollout_gpus) == (["0"], ["0,1"])


def test_every_node_is_idle_when_up_returns(root: Path) -> None:
    running = cluster.up(root, nodes=2, gpus_per_node=1)

    assert node_states(running.slurm_conf) == {"node0": "idle", "node1": "idle"}


def test_down_leaves_no_process_no_port_and_no_folder_although_a_job_resists(root: Path, tmp_path: Path) -> None:
    running = cluster.up(root, nodes=1)
    site = running.site
    daemons = record_of(root).daemons
    sbatch(running, STUBBORN, tmp_path)
    assert wait_until((tmp_path / "running").exists, 30.0)

    assert cluster.down(root)

    assert [daemon for daemon in daemons if is_alive(daemon)] == []
    assert find_members(root) == []
    assert all(is_free(port) for port in (site.controller_port, *site.node_ports))
    assert not root.parent.exists()


def test_down_after_a_crash_ends_the_jobs_that_the_daemons_left_behind(root: Path, tmp_path: Path) -> None:
    running = cluster.up(root, nodes=1)
    sbatch(running, STUBBORN, tmp_path)
    assert wait_until((tmp_path / "running").exists, 30.0)
    daemons = record_of(root).daemons
    for daemon in daemons:
        os.kill(daemon.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(is_alive(daemon) for daemon in daemons), 10.0)

    assert cluster.down(root)

    assert find_members(root) == []


def test_up_twice_gives_the_same_cluster_with_its_jobs(root: Path, tmp_path: Path) -> None:
    first = cluster.up(root, nodes=1)
    sbatch(first, STUBBORN, tmp_path)

    second = cluster.up(root, nodes=1)

    assert second == first
    assert job_ids(second.slurm_conf) == ["1"]


def test_up_with_another_shape_is_refused_while_one_runs(root: Path) -> None:
    cluster.up(root, nodes=1)

    with pytest.raises(DevClusterRequestError, match="Stop it first"):
        cluster.up(root, nodes=2)


def test_three_ups_at_once_start_one_cluster(root: Path) -> None:
    found: list[cluster.DevCluster] = []
    callers = [threading.Thread(target=lambda: found.append(cluster.up(root, nodes=1))) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120.0)

    assert len(found) == 3
    assert len(set(found)) == 1
    assert len(record_of(root).daemons) == 3
    assert {member.pid for member in find_members(root)} >= {daemon.pid for daemon in record_of(root).daemons}


def test_up_after_the_loss_of_a_daemon_starts_anew(root: Path) -> None:
    cluster.up(root, nodes=1)
    (controller,) = [daemon for daemon in record_of(root).daemons if daemon.name == "slurmctld"]
    os.kill(controller.pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(controller), 10.0)

    again = cluster.up(root, nodes=1)

    assert node_states(again.slurm_conf) == {"node0": "idle"}


def test_up_brings_back_a_node_that_was_set_down(root: Path) -> None:
    running = cluster.up(root, nodes=1)
    command = ["scontrol", "update", "NodeName=node0", "State=DOWN", "Reason=drill"]
    subprocess.run(command, env=running.env(), check=True, timeout=60)

    cluster.up(root, nodes=1)

    assert node_states(running.slurm_conf) == {"node0": "idle"}


def test_a_daemon_that_cannot_start_is_an_error_with_its_log_and_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.devcluster.daemons.render_slurm_conf", lambda site: "Nonsense=1\n")

    with pytest.raises(DevClusterError, match=r"(?s)did not start.*Nonsense"):
        cluster.up(root, nodes=1)

    assert not root.parent.exists()


def test_a_port_that_was_taken_meanwhile_is_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cluster.up(root.parent.parent / "first", nodes=1)
    taken = first.site.controller_port
    offers = iter([(taken, *free_ports(1)), free_ports(2)])
    monkeypatch.setattr("launch.devcluster.cluster.free_ports", lambda count: next(offers))

    second = cluster.up(root, nodes=1)
    cluster.down(first.root)

    assert second.site.controller_port != taken


def test_an_interrupted_up_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        start_all(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "start_all", interrupt)

    with pytest.raises(KeyboardInterrupt):
        cluster.up(root, nodes=1)

    assert not root.parent.exists()
    assert find_members(root) == []


def test_a_slurm_that_the_caller_uses_stays_out_of_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "other.conf"))
    monkeypatch.setenv("SLURM_JOB_ID", "99")

    running = cluster.up(root, nodes=1)

    assert running.env()["SLURM_CONF"] == str(root / "slurm.conf")
    assert "SLURM_JOB_ID" not in running.env()
