"""People's commands on a real Slurm with fake stages: why a job waits, leaving and coming back, ending, going on, every state.

The commands run as a user starts them, in processes of their own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch import pipeline, resume, slurm, truth
from launch.errors import LibraError
from launch.executors import submit
from launch.report import report, text
from launch.submission import Submission
from stages.files import list_names, make_directory
from stages.rollout.node_folder import sweep_node_folders
from stages.rundir import RunDir
from tests.fake_runs import WORKING, await_ready, go, processes_of, state, until
from tests.fake_stages import STEPS_PER_ATTEMPT, entry
from tests.leftovers import Belongings
from tests.made_runs import take_away
from tests.people_kit import Open, people, terminal, told

__all__ = ["terminal"]
pytestmark = pytest.mark.slurm

TASKS = ("trainer.0", "controller.0", "rollout_000.0", "rollout_001.0")
TRAINING = {"trainer": {"do": "train"}}
LIMIT_S = 20.0
START_S = 60.0
REQUEUE_S = 90.0
UNKNOWN_JOB = "9999999"


def prepared_run(root: Path, *words: str) -> tuple[RunDir, pipeline.Prepared]:
    """As `python -m launch +experiment=demo cluster=devcluster rollout_gpus=2` makes it; its stages are fakes."""
    prepared = pipeline.prepare(
        ["+experiment=demo", "cluster=devcluster", "rollout_gpus=2", f"launch.run_dir={root}", *words]
    )
    return pipeline.create_run(prepared), prepared


class Job:
    """A submitted run. `is_over` waits for the end of everything."""

    def __init__(self, root: Path, behaviours: dict[str, dict[str, object]], words: tuple[str, ...] = ()) -> None:
        self.run, prepared = prepared_run(root, *words)
        make_directory(self.run.root / "ready")
        (self.run.root / "fake.json").write_text(json.dumps({**WORKING, **behaviours}))
        self.submission: Submission = submit(prepared.config, prepared.plan, self.run, entry=entry)
        self.run.write(self.run.submission_json, {"mode": "slurm", "job_id": self.submission.job_id})
        self.held = Belongings(self.run)

    @property
    def id(self) -> int:
        return int(self.submission.job_id)

    def is_up(self) -> Job:
        await_ready(self.run, TASKS, START_S)
        self.held.note()
        return self

    def is_over(self) -> None:
        until(lambda: slurm.fold(slurm.query(self.id)).phase.is_over, LIMIT_S, "the end of the job")
        until(lambda: not processes_of(self.run), LIMIT_S, "the end of all processes")


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path, slurm_conf: Path) -> Iterator[Start]:
    made: list[Job] = []

    def starter(behaviours: dict[str, dict[str, object]] | None = None, *words: str) -> Job:
        made.append(Job(tmp_path / "first light", behaviours or {"trainer": {"do": "work"}}, words))
        return made[-1]

    yield starter
    for job in made:
        slurm.cancel_job(job.id)
        job.is_over()
        job.held.assert_gone(slurm_conf)


@pytest.fixture
def blocker(slurm_conf: Path) -> Iterator[int]:
    """A job that leaves one node of four."""
    words = ["sbatch", "--parsable", "--exclusive", "-N3", "--time=5", "-o", "/dev/null", "--wrap", "sleep 300"]
    job_id = int(subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout)
    until(lambda: slurm.query(job_id)[0].state == "RUNNING", LIMIT_S, "the job in the way")
    yield job_id
    slurm.cancel_job(job_id)
    until(lambda: slurm.query(job_id)[0].phase.is_over, LIMIT_S, "the end of the job in the way")


# ---- waiting -------------------------------------------------------------------------------------------------------------


def test_a_job_larger_than_the_free_nodes_says_why_it_waits_and_starts_when_they_are_free(
    start: Start, blocker: int, terminal: Open
) -> None:
    job = start()
    follower = terminal("follow", job.run)

    follower.shows(f"job {job.id} is pending: Resources (waiting for free nodes)")
    follower.shows("no job comes first in partition dev")
    done = people("status", job.run)
    assert done.returncode == 0
    assert "state       pending" in done.stdout
    assert "waits: Resources (waiting for free nodes); no job comes first in partition dev" in done.stdout

    slurm.cancel_job(blocker)
    job.is_up()
    follower.shows("rollout_001: running")
    go(job.run)
    assert follower.code() == 0
    assert told(job.run) == ("succeeded", 0)
    job.is_over()


def test_a_job_in_the_queue_is_cancelled_and_its_followers_are_told(start: Start, blocker: int, terminal: Open) -> None:
    job = start()
    follower = terminal("follow", job.run)
    follower.shows("is pending")

    done = people("cancel", job.run)

    assert (done.returncode, done.stderr) == (0, "")
    assert f"job {job.id} was taken out of the queue" in done.stdout
    assert told(job.run) == ("failed", 1)
    assert "before it started" in people("status", job.run).stdout
    assert follower.code(40.0) == 143
    assert "it was cancelled by" in follower.text


# ---- leaving and coming back ---------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_the_job_alone_and_following_again_shows_its_end(start: Start, terminal: Open) -> None:
    job = start().is_up()
    first = terminal("follow", job.run)
    first.shows("trainer: running")

    first.ctrl_c()

    assert first.code() == 130
    assert "detached; the job goes on" in first.text
    assert "python -m launch.follow" in first.text
    assert told(job.run) == ("running", 0)
    second = terminal("follow", job.run)
    second.shows("trainer: running")
    go(job.run)
    assert second.code() == 0
    job.is_over()


def test_a_second_ctrl_c_ends_the_run_with_a_checkpoint(start: Start, terminal: Open) -> None:
    job = start(TRAINING).is_up()
    follower = terminal("follow", job.run)
    follower.shows("trainer: running")

    follower.ctrl_c()
    follower.shows("detached")
    follower.ctrl_c()

    assert follower.code(40.0) == 130
    assert f"its newest checkpoint is step_{STEPS_PER_ATTEMPT:06d}" in follower.text
    job.is_over()
    assert told(job.run) == ("failed", 1)


def test_a_followed_run_ends_with_the_exit_code_of_its_cause(start: Start, terminal: Open) -> None:
    job = start().is_up()
    follower = terminal("follow", job.run)
    follower.shows("trainer: running")

    os.kill(int((job.run.root / "ready" / "trainer.0").read_text()), signal.SIGKILL)

    assert follower.code() == 137
    assert "the run failed: trainer: killed by SIGKILL" in follower.text
    assert told(job.run) == ("failed", 1)
    job.is_over()


def test_a_requeued_run_is_followed_through_the_queue_into_its_next_attempt(
    start: Start, terminal: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal that Slurm sends before the time limit; the private Slurm lets a requeued job wait for about half a minute.

    All the time somebody asks for the status, which must have an answer at any moment.
    """
    job = start(TRAINING).is_up()
    monkeypatch.setattr(truth, "LOOK_S", 0.0)
    states, asking = list[str](), threading.Event()

    def ask() -> None:
        while not asking.wait(0.05):
            said = report(truth.tell_one(job.run.root), disk_budget_s=0.05)
            states.append(said.state if text(said) else "")

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    follower = terminal("follow", job.run)
    follower.shows("trainer: running")

    slurm.signal_batch(job.id, "USR1")

    follower.shows("attempt 0 is over, the run goes on in another", REQUEUE_S)
    follower.shows(f"job {job.id} is pending: BeginTime", REQUEUE_S)
    assert told(job.run) == ("requeued", 0)
    follower.shows(f"attempt 1 (requeue), from step {STEPS_PER_ATTEMPT}", REQUEUE_S)
    later = RunDir.open(job.run.root, writer="test")
    until(lambda: state(later).get("phase") == "running", REQUEUE_S, "the second attempt")
    go(later)
    assert follower.code(REQUEUE_S) == 0
    assert told(later) == ("succeeded", 0)
    asking.set()
    asker.join(LIMIT_S)
    assert states[-1] == "succeeded"
    assert set(states) <= {"running", "stopping", "requeued", "starting", "succeeded"}
    shown = people("status", later).stdout
    assert f"1 (requeue, from step {STEPS_PER_ATTEMPT}; before it: 0 requeued)" in shown
    job.is_over()


# ---- ending and going on -------------------------------------------------------------------------------------------------


def test_cancel_ends_a_running_job_and_says_its_last_word(start: Start) -> None:
    job = start().is_up()

    done = people("cancel", job.run)

    assert done.returncode == 0, done.stderr
    assert "failed, supervisor: the run was cancelled by" in done.stdout
    job.is_over()
    assert {part.exit_code for part in slurm.query(job.id)} == {"143:0"}
    assert "is over already" in people("cancel", job.run).stdout


def test_a_run_that_was_ended_with_a_checkpoint_goes_on_from_there(start: Start, terminal: Open) -> None:
    job = start(TRAINING).is_up()
    refused = people("resume", job.run)
    assert refused.returncode == 2
    assert "is running, it cannot be resumed" in refused.stderr
    done = people("cancel", job.run, "--checkpoint")
    assert f"its newest checkpoint is step_{STEPS_PER_ATTEMPT:06d}" in done.stdout, done.stdout + done.stderr
    job.is_over()
    take_away(job.run, "ready")
    make_directory(job.run.root / "ready")

    resumption = resume.prepare(job.run.root, ["slurm.time_min=9"])
    later, submission = resume.start(resumption, entry=entry)
    try:
        await_ready(later, TASKS, START_S)
        assert (later.root / "ready" / "from.1").read_text() == str(STEPS_PER_ATTEMPT)
        follower = terminal("follow", later)
        follower.shows("trainer: running")
        shown = people("status", later).stdout
        assert f"1 (resume, from step {STEPS_PER_ATTEMPT}" in shown
        assert "--time=9" in later.job_sbatch.read_text()
        go(later)
        assert follower.code() == 0
    finally:
        slurm.cancel_job(int(submission.job_id))
        until(lambda: slurm.query(int(submission.job_id))[0].phase.is_over, LIMIT_S, "the end of the second job")
    assert told(later) == ("succeeded", 0)


def test_a_resumption_that_slurm_refuses_leaves_no_attempt(start: Start) -> None:
    job = start(TRAINING).is_up()
    people("cancel", job.run, "--checkpoint")
    job.is_over()

    with pytest.raises(LibraError, match="nowhere"):
        resume.start(resume.prepare(job.run.root, ["slurm.partition=nowhere"]), entry=entry)

    assert list_names(job.run.root / "attempts") == ["0"]
    assert "nowhere" not in job.run.config_yaml.read_text()


# ---- every state ---------------------------------------------------------------------------------------------------------


def test_a_supervisor_that_was_killed_has_vanished(start: Start) -> None:
    job = start().is_up()

    os.kill(int(state(job.run)["pid"]), signal.SIGKILL)
    job.is_over()

    assert told(job.run) == ("vanished", 1)
    assert "killed by SIGKILL" in people("status", job.run).stdout
    # Nobody may have been left to clean the node; any next run of this user there begins with this.
    sweep_node_folders()


def test_after_min_job_age_the_run_directory_still_tells_the_truth(start: Start) -> None:
    """A job id that this Slurm does not know is what a purged one looks like."""
    job = start().is_up()
    go(job.run)
    job.is_over()
    finished = state(job.run)
    job.run.write(job.run.submission_json, {"mode": "slurm", "job_id": UNKNOWN_JOB})

    assert told(job.run) == ("succeeded", 0)
    job.run.write(job.run.state_json, {**finished, "phase": "running", "job_id": UNKNOWN_JOB})
    done = people("status", job.run)
    assert done.returncode == 1
    assert "state       vanished" in done.stdout
    assert f"Slurm does not know job {UNKNOWN_JOB} any more" in done.stdout
    assert "how it ended is unknown" in done.stdout


def test_a_half_deleted_run_names_what_is_missing(start: Start) -> None:
    job = start().is_up()
    go(job.run)
    job.is_over()
    take_away(job.run, "plan.json", "weights")

    done = people("status", job.run)

    assert done.returncode == 1
    assert "half-deleted (otherwise: succeeded)" in done.stdout
    assert "plan.json (missing)" in done.stdout


def test_a_running_run_is_told_with_its_job_and_nodes_within_the_look(start: Start) -> None:
    job = start().is_up()

    done = people("status", job.run)

    assert done.returncode == 0
    assert re.search(rf"job +Slurm job {job.id} on node\d, node\d, \d+:\d\d", done.stdout)
    assert "attempt     0" in done.stdout


def test_logs_follow_a_run_to_its_end(start: Start, terminal: Open) -> None:
    job = start().is_up()
    view = terminal("logs", job.run, "-f")
    view.shows("| trainer rank 0 of 1")

    go(job.run)

    assert view.code() == 0
    assert "phase=succeeded" in view.text
    job.is_over()


def test_the_list_shows_a_run_of_the_cluster(start: Start) -> None:
    job = start().is_up()
    words = [sys.executable, "-m", "launch.list", "--root", str(job.run.root.parent)]

    rows = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()

    assert re.match(rf"first light +demo +running +0/250 +- .* {job.id}$", rows[1])
