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
from typing import Any

import pytest

from conf.schema import LibraConfig
from launch import slurm
from launch.executors import SubmitError, submit
from launch.submission import SlurmSubmission
from planner.plan import Plan
from tests.fake_runs import await_ready, fake_config, fake_plan, fake_run, go, processes_of, state, until
from tests.fake_stages import entry

pytestmark = pytest.mark.slurm

TASKS = ["trainer.0", "trainer.1", "controller.0", "rollout_000.0", "rollout_001.0"]
SERVING = {"trainer": {"do": "serve"}}
WORKING = {"trainer": {"do": "work"}}
LIMIT_S = 15.0
"""From a death to the end of everything."""


def slurm_config() -> LibraConfig:
    """Two nodes of the development cluster."""
    config = fake_config("slurm")
    config.hardware.gpus_per_node = 2
    config.slurm.partition = "dev"
    config.slurm.mem_per_node_bytes = 2e9
    config.slurm.time_min = 10
    return config


class SlurmRun:
    def __init__(self, root: Path, plan: Plan, behaviours: dict[str, dict[str, Any]]) -> None:
        self.config = slurm_config()
        self.run = fake_run(root, self.config, plan, behaviours)
        submission = submit(self.config, plan, self.run, entry=entry)
        assert isinstance(submission, SlurmSubmission)
        self.submission = submission
        self.job_id = int(submission.job_id)
        self.pids = await_ready(self.run, TASKS)

    def end(self) -> tuple[str, str]:
        """The run's last word, once its job is over and no process of it is left."""
        until(lambda: self.submission.poll()[0] in ("succeeded", "failed"), LIMIT_S, "the end of the run")
        word = self.submission.poll()
        until(lambda: slurm.fold(slurm.query(self.job_id)).phase.is_over, LIMIT_S, "the end of the job")
        until(lambda: not processes_of(self.run), LIMIT_S, "the end of all processes")
        return word

    def slurms_verdict(self) -> list[tuple[str, str]]:
        """(state, exit code) of each component."""
        return [(part.state, part.exit_code) for part in slurm.query(self.job_id)]


Start = Callable[..., SlurmRun]


@pytest.fixture
def start(tmp_path: Path, slurm_conf: Path) -> Iterator[Start]:
    """The run directory has a blank in its name: script, commands and log names must be quoted right."""
    made: list[SlurmRun] = []

    def starter(behaviours: dict[str, dict[str, Any]] | None = None, plan: Plan | None = None) -> SlurmRun:
        plan = plan or fake_plan("hetjob", train_gpus=2)
        made.append(SlurmRun(tmp_path / "first light", plan, behaviours or {}))
        return made[-1]

    yield starter
    for run in made:
        slurm.cancel_job(run.job_id)
        until(lambda run=run: slurm.fold(slurm.query(run.job_id)).phase.is_over, 30.0, "the cancelled job")  # type: ignore[misc]


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


@pytest.mark.parametrize(
    "victim, said",
    [
        ("trainer.1", "trainer: rank 1 killed by SIGKILL"),
        ("controller.0", "controller: killed by SIGKILL"),
        ("rollout_001.0", "rollout_001: killed by SIGKILL"),
    ],
)
def test_a_killed_stage_ends_the_job_and_is_named(start: Start, victim: str, said: str) -> None:
    run = start(SERVING)

    os.kill(run.pids[victim], signal.SIGKILL)

    assert run.end() == ("failed", said)
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
    run = start({"controller": {"do": "leave", "code": 7}})
    go(run.run)

    assert run.end() == ("failed", "controller: exited 7")
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


def test_the_warning_before_the_time_limit_ends_the_run(start: Start) -> None:
    run = start(SERVING)

    slurm.signal_batch(run.job_id, "USR1")

    word, reason = run.end()
    assert word == "failed"
    assert "raise slurm.time_min" in reason
    assert run.slurms_verdict()[0] == ("FAILED", "124:0")


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
