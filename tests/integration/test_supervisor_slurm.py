"""Runs with fake stages as real heterogeneous jobs on the private Slurm: who dies, what the job then says, what is left.

The stages take no torch and no vLLM, so a job runs in seconds; everything else is the product's own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from launch import slurm
from launch.devcluster.cluster import DevCluster
from launch.executors import SubmitError, submit
from tests.fake_runs import fake_plan, fake_run, go, state, until
from tests.fake_stages import entry
from tests.slurm_kit import LIMIT_S, SERVING, WORKING, Start, slurm_config, slurm_runs

pytestmark = pytest.mark.slurm


@pytest.fixture
def start(tmp_path: Path, slurm_conf: Path) -> Iterator[Start]:
    with slurm_runs(tmp_path, slurm_conf) as starter:
        yield starter


def test_a_run_is_one_job_of_two_components_and_five_tasks(start: Start) -> None:
    run = start(WORKING)

    parts = slurm.query(run.job_id)
    assert [(part.offset, part.state) for part in parts] == [(0, "RUNNING"), (1, "RUNNING")]
    assert parts[0].nodes != parts[1].nodes
    steps = slurm.step_ids([run.job_id, run.job_id + 1])
    assert set(steps) == {"trainer.0", "controller.0", "rollout_000.0", "rollout_001.0"}
    assert steps["rollout_000.0"].startswith(f"{run.job_id + 1}.")
    go(run.run)

    assert run.end() == ("succeeded", "")
    assert run.slurms_verdict() == [("COMPLETED", "0:0"), ("COMPLETED", "0:0")]
    assert run.submission.job.result()["outcome"] == "success"


def test_gpus_are_shared_out_and_the_controller_has_none(start: Start) -> None:
    run = start(WORKING)

    seen = {name: cuda_devices(pid) for name, pid in run.pids.items()}

    assert seen["trainer.0"] == seen["trainer.1"] == "0,1"
    assert {seen["rollout_000.0"], seen["rollout_001.0"]} == {"0", "1"}
    assert seen["controller.0"] == ""


def cuda_devices(pid: int) -> str:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(
        (entry.split(b"=", 1)[1].decode() for entry in entries if entry.startswith(b"CUDA_VISIBLE_DEVICES=")), ""
    )


def test_a_killed_trainer_ends_the_job_and_is_named(start: Start) -> None:
    run = start(SERVING)

    os.kill(run.pids["trainer.1"], signal.SIGKILL)

    assert run.end() == ("failed", "trainer: rank 1 killed by SIGKILL")
    assert run.submission.exit_code == 137
    assert run.slurms_verdict() == [("FAILED", "137:0"), ("FAILED", "137:0")]


def test_a_killed_supervisor_takes_every_step_along(start: Start) -> None:
    run = start({"trainer": {"do": "hang", "ignore_term": True}, "rollout_000": {"do": "serve", "grandchild": True}})

    os.kill(state(run.run)["pid"], signal.SIGKILL)

    word, reason = run.end()
    assert word == "failed"
    assert "killed by SIGKILL" in reason
    assert run.submission.exit_code == 1
    assert run.slurms_verdict()[0] == ("FAILED", "0:9")


def test_a_rank_that_hangs_after_its_peer_died_does_not_hold_the_nodes(start: Start) -> None:
    run = start({"trainer": {"do": "hang", "ignore_term": True, "ranks": [0]}})
    started_s = time.monotonic()

    os.kill(run.pids["trainer.1"], signal.SIGKILL)

    assert run.end() == ("failed", "trainer: rank 1 killed by SIGKILL")
    assert time.monotonic() - started_s < 10.0


def test_a_stage_that_raises_ends_the_job_with_its_exception(start: Start) -> None:
    run = start({"trainer": {"do": "fail", "ranks": [1]}})
    go(run.run)

    word, reason = run.end()

    assert word == "failed"
    assert reason == "trainer: rank 1 exited 1: tests.fake_stages.FakeStageError: the boiler burst\nat 3 bar"
    assert "the boiler burst" in state(run.run)["cause"]["log_tail"]
    assert run.slurms_verdict()[0] == ("FAILED", "1:0")


def test_the_job_has_the_stages_own_exit_code(start: Start) -> None:
    run = start({"trainer": {"do": "leave", "code": 7, "ranks": [0]}})
    go(run.run)

    assert run.end() == ("failed", "trainer: rank 0 exited 7")
    assert run.slurms_verdict() == [("FAILED", "7:0"), ("FAILED", "7:0")]


def test_a_cancelled_component_ends_the_job_and_is_named(start: Start) -> None:
    run = start(SERVING)

    subprocess.run(["scancel", str(run.job_id + 1)], check=True, timeout=30)

    word, reason = run.end()
    assert word == "failed"
    assert reason.startswith("rollout_00")
    assert reason.endswith("component 1 is CANCELLED")
    assert run.slurms_verdict()[0][0] == "FAILED"


@pytest.mark.parametrize("how", ["submission", "scancel"])
def test_a_cancelled_run_says_that_it_was_cancelled(start: Start, how: str) -> None:
    run = start(SERVING)

    if how == "submission":
        run.submission.cancel()
    else:
        subprocess.run(["scancel", str(run.job_id)], check=True, timeout=30)

    assert run.end() == ("failed", "supervisor: the run was cancelled (SIGTERM)")
    assert run.submission.exit_code == 143


def test_a_cancelled_run_is_not_blamed_on_an_instance_when_the_batch_host_hears_of_it_last(
    start: Start, devcluster: DevCluster
) -> None:
    """The slurmd of a busy batch host: nothing is passed on until the instances' ends have been seen."""
    run = start(SERVING)
    (host,) = state(run.run)["steps"]["trainer"]["hosts"]
    slurmd = int((devcluster.root / "run" / f"{host}.pid").read_text())

    os.kill(slurmd, signal.SIGSTOP)
    try:
        subprocess.run(["scancel", str(run.job_id)], check=True, timeout=30)
        until(lambda: run.events("job_is_ending") or state(run.run)["cause"], LIMIT_S, "an instance's end to be seen")
    finally:
        os.kill(slurmd, signal.SIGCONT)

    assert run.end() == ("failed", "supervisor: the run was cancelled (SIGTERM)")
    assert run.submission.exit_code == 143


def test_a_single_job_runs_the_same_steps(start: Start) -> None:
    run = start(WORKING, plan=fake_plan("single", train_gpus=2, rollout_node=1))

    parts = slurm.query(run.job_id)
    assert [len(slurm.expand_nodes(part.nodes)) for part in parts] == [2]
    assert cuda_devices(run.pids["trainer.0"]) == "0,1"
    go(run.run)

    assert run.end() == ("succeeded", "")
    assert run.slurms_verdict() == [("COMPLETED", "0:0")]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda config: setattr(config.slurm, "partition", "nowhere"), "invalid partition specified: nowhere"),
        (
            lambda config: setattr(config.slurm, "mem_per_node_bytes", 1e15),
            r"want 1 node\(s\) with 1 GPUs, 2 processors, 1e\+06 GB in partition dev, available 0",
        ),
    ],
)
def test_a_job_that_cannot_run_is_refused_with_slurms_words(
    tmp_path: Path, slurm_conf: Path, change: Callable[[LibraConfig], None], message: str
) -> None:
    config, plan = slurm_config(), fake_plan("hetjob")
    change(config)
    run = fake_run(tmp_path / "run", config, plan)

    with pytest.raises(SubmitError, match=message):
        submit(config, plan, run, entry=entry)

    assert slurm.command(["squeue", "-h", "-o", "%i"]) == ""
