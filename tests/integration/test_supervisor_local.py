"""A whole local run with fake stages: launcher -> submitit's controller -> supervisor -> steps, and the death of each.

Fast (no Slurm, no vLLM), but with real processes, real signals and the real chain of parents.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from launch import submission
from launch.cancel_request import CancelRequest, write_cancel_request
from launch.executors import submit
from launch.local import LocalPairJob
from stages.rollout.node_folder import node_folder_path
from tests.fake_runs import await_ready, fake_config, fake_plan, fake_run, go, processes_of, state, until
from tests.fake_stages import entry
from tests.local_kit import LIMIT_S, SERVING, TASKS, Start, local_runs


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Start]:
    with local_runs(tmp_path) as start:
        yield start


def test_a_run_that_goes_well_succeeds_and_leaves_nothing(local: Start) -> None:
    run = local()
    go(run.run)

    assert run.end() == ("succeeded", "")
    assert run.submission.exit_code == 0
    assert cast(LocalPairJob, run.submission.job).result()["outcome"] == "success"
    assert {name: step["state"] for name, step in state(run.run)["steps"].items()} == {
        "trainer": "ended",
        "controller": "ended",
        "rollout_000": "stopped",
        "rollout_001": "stopped",
    }


def test_all_that_a_run_leaves_belongs_to_its_owner_alone(local: Start) -> None:
    before = os.umask(0)
    try:
        run = local()
        go(run.run)
        run.end()
    finally:
        os.umask(before)

    left = [path for path in run.run.attempt_dir.rglob("*") if not path.is_symlink()]
    assert {"supervisor.log", "trainer.1.log"} <= {path.name for path in left}
    assert any(path.suffix == ".pkl" for path in left)
    assert [str(path) for path in left if path.stat().st_mode & 0o077] == []


def test_a_killed_trainer_ends_the_run_and_is_named(local: Start) -> None:
    run = local(SERVING)

    os.kill(run.pids["trainer.1"], signal.SIGKILL)

    assert run.end() == ("failed", "trainer: rank 1 killed by SIGKILL")
    assert run.submission.exit_code == run.submission.job.exit_status() == 137


def test_a_killed_instance_is_replaced_and_the_run_succeeds(local: Start) -> None:
    run = local({"trainer": {"do": "work"}})

    os.kill(run.pids["rollout_001.0"], signal.SIGKILL)
    run.next_pid("rollout_001.0")
    go(run.run)

    assert run.end() == ("succeeded", "")
    (restart,) = run.events("restart")
    assert (restart["name"], restart["reason"], restart["restarts"]) == ("rollout_001", "killed by SIGKILL", 1)
    assert (run.run.logs / "rollout_001.1.0.log").exists()


def test_an_instance_that_is_killed_too_often_ends_the_run(local: Start) -> None:
    config = fake_config()
    config.rollout.max_replacements = 1
    run = local(SERVING, config)

    os.kill(run.pids["rollout_001.0"], signal.SIGKILL)
    os.kill(run.next_pid("rollout_001.0"), signal.SIGKILL)

    word, reason = run.end()
    assert word == "failed"
    assert reason.startswith("rollout_001: killed by SIGKILL; it had been replaced 1 times")
    assert run.submission.exit_code == run.submission.job.exit_status() == 137


def test_a_killed_controller_is_started_again_once(local: Start) -> None:
    run = local({"trainer": {"do": "work"}})

    os.kill(run.pids["controller.0"], signal.SIGKILL)
    run.next_pid("controller.0")
    go(run.run)

    assert run.end() == ("succeeded", "")


def test_a_controller_that_is_killed_twice_ends_the_run(local: Start) -> None:
    run = local(SERVING)

    os.kill(run.pids["controller.0"], signal.SIGKILL)
    os.kill(run.next_pid("controller.0"), signal.SIGKILL)

    assert run.end() == ("failed", "controller: killed by SIGKILL; it had been started again once")
    assert run.submission.exit_code == 137


def test_a_killed_supervisor_takes_every_step_along(local: Start) -> None:
    run = local({**SERVING, "rollout_000": {"do": "serve", "ignore_term": True, "grandchild": True}})

    os.kill(state(run.run)["pid"], signal.SIGKILL)

    assert run.end() == ("failed", "supervisor: killed by SIGKILL")
    assert run.submission.exit_code == 1


@pytest.mark.parametrize("victim", ["trainer.0", "supervisor"])
def test_what_an_instance_left_on_the_node_goes_with_the_run(local: Start, victim: str) -> None:
    run = local(SERVING)
    left = node_folder_path(run.run.run_id) / "rollout_000-1234"
    left.parent.mkdir(mode=0o700, exist_ok=True)
    left.mkdir()
    (left / "socket").touch()

    os.kill(state(run.run)["pid"] if victim == "supervisor" else run.pids[victim], signal.SIGKILL)

    run.end()
    assert not left.parent.exists()


def test_a_supervisor_that_cannot_record_its_end_says_why_nevertheless(local: Start) -> None:
    run = local(SERVING)

    run.run.start_attempt(1)

    status, reason = run.end()
    assert status == "failed"
    assert reason.startswith("supervisor: exited 1: the state cannot be recorded: attempt 0 (supervisor) is over")


def test_a_supervisor_that_hangs_is_noticed_named_and_ended(local: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "HUNG_S", 2.5)
    run = local(SERVING)
    assert run.submission.poll() == ("running", "")

    os.kill(state(run.run)["pid"], signal.SIGSTOP)

    assert run.end() == ("failed", "supervisor: hung: its heartbeat stood still for 2.5 s; it was killed")


def test_a_killed_controller_of_submitit_ends_the_run_in_order(local: Start) -> None:
    run = local(SERVING)

    os.kill(int(run.submission.job_id), signal.SIGKILL)

    assert run.end() == (
        "failed",
        "supervisor: the launcher, or submitit's controller that it started, ended, and the run with it",
    )


def test_a_stage_that_raises_ends_the_run_with_its_exception_and_log(local: Start) -> None:
    run = local({"trainer": {"do": "fail", "ranks": [0]}})
    go(run.run)

    state_, reason = run.end()

    assert state_ == "failed"
    assert "trainer: rank 0 exited 1: tests.fake_stages.FakeStageError: the boiler burst\nat 3 bar" in reason
    assert "the boiler burst" in state(run.run)["cause"]["log_tail"]
    log = (run.run.logs / "supervisor.log").read_text()
    assert "the run failed: trainer: rank 0 exited 1" in log


def test_the_supervisor_exits_with_the_stages_own_code(local: Start) -> None:
    run = local({"trainer": {"do": "leave", "code": 7, "ranks": [0]}})
    go(run.run)

    assert run.end() == ("failed", "trainer: rank 0 exited 7")
    assert run.submission.job.exit_status() == 7


def test_stages_that_ignore_term_do_not_hold_the_run_up(local: Start) -> None:
    stubborn = {"do": "hang", "ignore_term": True, "grandchild": True}
    run = local({"trainer": {**stubborn, "ranks": [0]}, "rollout_000": stubborn, "rollout_001": stubborn})
    started_s = time.monotonic()

    os.kill(run.pids["trainer.1"], signal.SIGKILL)

    assert run.end() == ("failed", "trainer: rank 1 killed by SIGKILL")
    assert time.monotonic() - started_s < 10.0


def test_cancelling_stops_everything_and_says_so(local: Start) -> None:
    run = local(SERVING)

    run.submission.cancel()

    assert run.end() == ("failed", "supervisor: the run was cancelled (SIGTERM)")
    assert run.submission.exit_code == 143


def test_the_warning_before_a_limit_saves_and_ends_the_run_which_a_person_can_resume(local: Start) -> None:
    run = local({"trainer": {"do": "train"}})

    os.kill(state(run.run)["pid"], signal.SIGUSR1)

    word, reason = run.end()
    assert word == "failed"
    assert "its newest checkpoint is step_000005" in reason
    assert "python -m launch.resume" in reason
    assert (state(run.run)["cause"]["kind"], run.submission.exit_code) == ("time_limit", 124)


def test_people_can_ask_for_a_checkpoint_before_the_end(local: Start) -> None:
    run = local({"trainer": {"do": "train"}})

    write_cancel_request(run.run, CancelRequest(checkpoint=True, by="me@here"))

    word, reason = run.end()
    assert (word, run.submission.exit_code) == ("failed", 143)
    assert reason.startswith("supervisor: the run was cancelled by me@here")
    assert run.run.published_checkpoints() == [5]


LAUNCHER = """
import sys, time
from pathlib import Path
from launch.executors import submit
from stages.rundir import RunDir
from tests.fake_runs import fake_config, fake_plan
from tests.fake_stages import entry
submit(fake_config(), fake_plan(train_gpus=2), RunDir.open(Path(sys.argv[1]), writer="launcher"), entry=entry)
time.sleep(600)
"""


def test_a_killed_launcher_takes_the_whole_run_along(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", fake_config(), fake_plan(train_gpus=2), SERVING)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run.root)])
    try:
        await_ready(run, TASKS)
    finally:
        launcher.kill()
        launcher.wait(10)

    until(lambda: not processes_of(run), LIMIT_S, "the end of all processes")

    assert state(run)["phase"] == "failed"
    assert (
        state(run)["cause"]["message"]
        == "the launcher, or submitit's controller that it started, ended, and the run with it"
    )


def test_a_supervisor_that_cannot_start_says_why(tmp_path: Path) -> None:
    config, plan = fake_config(), fake_plan()
    run = fake_run(tmp_path / "run", config, plan)
    run.config_yaml.write_text("train_gpuz: 3\n")

    submission = submit(config, plan, run, entry=entry)

    until(lambda: submission.poll()[0] == "failed", 30.0, "the failure")
    assert "train_gpuz" in submission.poll()[1]
    assert processes_of(run) == []
