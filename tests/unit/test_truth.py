"""What became of a run: every state told from what is left of it, and nothing claimed that nobody can know."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import truth
from launch.occupancy import launcher_mark
from launch.runs import Folder
from launch.truth import IN_JOBS, STATES, Answer, Beats, Facts, decide, tell, tell_one
from launch.waiting import QueuedJob
from stages.rundir import RunDir
from tests.fake_slurm import FakeSlurm, Job, beating, short_looks, slurm_in_memory
from tests.made_runs import (
    CAUSE,
    JOB,
    another_attempt,
    made,
    new_run,
    says,
    serves,
    submitted,
)

__all__ = ["short_looks", "slurm_in_memory"]


pytestmark = pytest.mark.usefixtures("slurm_in_memory", "short_looks")


def told(run: RunDir) -> tuple[str, str]:
    found = tell_one(run.root)
    return found.state, found.why


# ---- runs that are over ------------------------------------------------------------------------------------------------


def test_a_finished_run_has_succeeded_and_slurm_is_not_asked(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "succeeded")

    assert told(run) == ("succeeded", "")
    assert slurm_in_memory.calls == []


def test_a_failed_run_has_failed_with_its_cause(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "failed", cause=CAUSE)

    found = tell_one(run.root)

    assert (found.state, found.exit_code) == ("failed", 1)
    assert found.folder.state["cause"]["message"] == "rank 1 killed by SIGKILL"


def test_a_last_word_outlives_slurms_memory_of_the_job(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "succeeded")
    slurm_in_memory.jobs = {}

    assert told(run) == ("succeeded", "")


# ---- jobs in the queue ---------------------------------------------------------------------------------------------------


def test_a_job_that_waits_is_pending(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run")
    slurm_in_memory.jobs[41] = Job("PENDING", "Resources", start="2026-11-30T01:41:14")

    found = tell_one(run.root)

    assert (found.state, found.exit_code) == ("pending", 0)
    assert found.job is not None
    assert found.job.reason == "Resources"


def test_a_job_that_has_started_but_not_reported_is_starting(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run")
    slurm_in_memory.jobs[41] = Job("RUNNING", nodes="node[0-1]")

    state, why = told(run)

    assert state == "starting"
    assert "has not reported yet" in why


@pytest.mark.parametrize("phase", ["starting", "running", "stopping"])
def test_a_supervisor_whose_counter_moves_says_the_state(
    tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch, slurm_in_memory: FakeSlurm
) -> None:
    run = made(tmp_path / "run", phase)
    beating(run, monkeypatch)
    slurm_in_memory.is_down = True

    assert told(run) == (phase, "")


def test_a_silent_supervisor_whose_job_runs_is_said_to_be_silent(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "running")
    slurm_in_memory.jobs[41] = Job("SUSPENDED", nodes="node0")

    state, why = told(run)

    assert state == "running"
    assert "stood still" in why
    assert "SUSPENDED" in why


def test_a_requeued_run_waits_in_the_queue_again(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "requeued")
    slurm_in_memory.jobs[41] = Job("PENDING", "BeginTime")

    assert told(run) == ("requeued", "")


def test_a_run_that_slurm_requeued_by_itself_is_requeued(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "running")
    slurm_in_memory.jobs[41] = Job("PENDING", "BeginTime")

    assert told(run)[0] == "requeued"


def test_an_attempt_that_has_written_nothing_yet_has_the_job_of_the_one_before(
    tmp_path: Path, slurm_in_memory: FakeSlurm
) -> None:
    run = made(tmp_path / "run", "requeued")
    run.start_attempt(1)
    slurm_in_memory.jobs[41] = Job("RUNNING")

    found = tell_one(run.root)

    assert (found.state, found.folder.job_id, found.run.attempt) == ("starting", JOB, 1)


def test_a_chained_attempt_waits_under_its_own_job(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = another_attempt(made(tmp_path / "run", "requeued"), "chain", job_id="42")
    slurm_in_memory.jobs[42] = Job("PENDING", "Dependency")

    found = tell_one(run.root)

    assert (found.state, found.folder.job_id) == ("pending", "42")


# ---- vanished ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["", "starting", "running", "stopping", "requeued"])
@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL", "TIMEOUT", "COMPLETED", "OUT_OF_MEMORY"])
def test_a_job_that_is_over_without_a_last_word_has_vanished(
    tmp_path: Path, phase: str, state: str, slurm_in_memory: FakeSlurm
) -> None:
    run = made(tmp_path / "run", phase)
    slurm_in_memory.jobs[41] = Job(state, exit_code="0:9")

    found = tell_one(run.root)

    assert (found.state, found.exit_code) == ("vanished", 1)
    assert state in found.why


def test_a_job_that_slurm_has_forgotten_has_vanished_and_its_end_is_unknown(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "running")

    state, why = told(run)

    assert state == "vanished"
    assert "does not know job 41 any more" in why
    assert "how it ended is unknown" in why


def test_accounting_is_the_last_resort(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "running")
    slurm_in_memory.accounting[41] = "FAILED|0:9"

    assert "FAILED, killed by SIGKILL" in told(run)[1]


def test_accounting_is_not_asked_while_slurm_knows_the_job(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "running")
    slurm_in_memory.jobs[41] = Job("FAILED")

    tell_one(run.root)

    assert slurm_in_memory.asked("sacct") == 0


def test_a_job_that_was_cancelled_before_it_started_has_failed_with_who_did_it(
    tmp_path: Path, slurm_in_memory: FakeSlurm
) -> None:
    run = made(tmp_path / "run")
    run.write(run.cancel_json, {"checkpoint": False, "by": "ada@login1"})
    slurm_in_memory.jobs[41] = Job("CANCELLED")

    state, why = told(run)

    assert state == "failed"
    assert "ada@login1" in why


# ---- local runs ----------------------------------------------------------------------------------------------------------


def test_a_local_run_whose_supervisor_is_gone_has_vanished(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "running", "local", host=socket.gethostname(), pid=2**22 + 1)

    assert told(run)[0] == "vanished"


def test_another_process_with_the_supervisors_number_is_not_the_supervisor(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "running", "local", host=socket.gethostname(), pid=os.getpid())

    assert told(run)[0] == "vanished"


def test_a_stopped_supervisor_is_silent_and_alive(tmp_path: Path) -> None:
    run = submitted(new_run(tmp_path / "run"), "local")
    with subprocess.Popen([sys.executable, "-c", "input()", str(run.submitit)], stdin=subprocess.PIPE) as process:
        says(run, "running", "local", host=socket.gethostname(), pid=process.pid)
        try:
            state, why = told(run)
        finally:
            process.kill()

    assert state == "running"
    assert "its process lives" in why


def test_a_local_run_of_another_host_is_unknown_here(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "running", "local", host="login7")

    state, why = told(run)

    assert state == "unknown"
    assert "login7" in why


def test_a_run_whose_launcher_still_works_is_starting(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", launcher=launcher_mark())

    assert told(run)[0] == "starting"


def test_a_run_whose_launcher_died_before_it_submitted_has_vanished(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")

    assert told(run) == ("vanished", "its launcher ended before anything was started")


def test_a_resumption_whose_launcher_died_is_not_the_job_before(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    gone = launcher_mark() | {"started": "1"}
    run = another_attempt(made(tmp_path / "run", "failed", cause=CAUSE), launcher=gone)
    slurm_in_memory.jobs[41] = Job("RUNNING")

    assert told(run)[0] == "vanished"


@pytest.mark.parametrize(
    ("job", "host", "wanted"),
    [
        (Job("RUNNING"), socket.gethostname(), "vanished"),
        (Job("RUNNING"), "node7", "unknown"),
        (Job("TIMEOUT"), "node7", "vanished"),
        (None, "node7", "vanished"),
    ],
)
def test_a_run_in_the_allocation_of_a_shell_ends_with_its_supervisor_or_with_the_job(
    tmp_path: Path, job: Job | None, host: str, wanted: str, slurm_in_memory: FakeSlurm
) -> None:
    run = made(tmp_path / "run", "running", "allocation", host=host, pid=2**22 + 1)
    slurm_in_memory.jobs = {41: job} if job else {}

    assert told(run)[0] == wanted


# ---- nobody knows --------------------------------------------------------------------------------------------------------


def test_a_slurm_that_does_not_answer_leaves_a_silent_run_unknown(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "running")
    slurm_in_memory.is_down = True

    state, why = told(run)

    assert state == "unknown"
    assert "did not answer" in why


def test_a_state_that_no_release_documents_is_unknown(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "running")
    slurm_in_memory.jobs[41] = Job("SHINY")

    assert told(run)[0] == "unknown"


# ---- looking -------------------------------------------------------------------------------------------------------------


def test_instances_are_judged_by_counters_that_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path / "run", "running")
    serves(run, "rollout_000", 3)
    serves(run, "rollout_001", 3)
    ticks = itertools.count()
    monkeypatch.setattr(truth, "_counters", lambda _folder: {"": next(ticks), "a": next(ticks), "b": 5})

    beats = truth.watch([Folder.at(run.root)], look_s=0.05)[run.root, 0]

    assert (beats.supervisor, dict(beats.instances)) == (True, {"a": True, "b": False})


def test_looking_ends_as_soon_as_everything_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path / "run", "running")
    beating(run, monkeypatch)
    started_s = time.monotonic()

    truth.watch([Folder.at(run.root)], look_s=30.0)

    assert time.monotonic() - started_s < 5.0


def test_one_squeue_serves_many_runs(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    runs = [submitted(new_run(tmp_path / str(number)), job_id=str(number)) for number in (51, 52, 53)]
    slurm_in_memory.jobs = {number: Job("PENDING", "Priority") for number in (51, 52, 53)}

    found = tell([run.root for run in runs])

    assert [one.state for one in found] == ["pending"] * 3
    assert slurm_in_memory.asked("squeue") == 1


# ---- the rule itself -----------------------------------------------------------------------------------------------------

JOBS = st.sampled_from(["PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "FAILED", "NODE_FAIL", "SHINY"])
ANSWERS = st.one_of(
    st.none(),
    st.builds(Answer, st.sampled_from(["over", "forgotten", "silent"]), st.text(max_size=3)),
    JOBS.map(lambda state: Answer("queued", job=QueuedJob(41, state, "", (), None, None, 1, ()))),
)
FACTS = st.builds(
    Facts,
    phase=st.sampled_from(["", "starting", "running", "stopping", "requeued", "succeeded", "failed"]),
    mode=st.sampled_from(["", "slurm", "local", "allocation"]),
    job_id=st.just("41"),
    beats=st.builds(Beats, st.sampled_from([None, True, False])),
    answer=ANSWERS,
    process=st.sampled_from(["", "here", "gone", "elsewhere"]),
    host=st.just("node0"),
    cancelled_by=st.sampled_from(["", "ada"]),
)


@given(FACTS)
def test_every_combination_of_facts_has_a_state_and_a_last_word_wins(facts: Facts) -> None:
    if facts.beats.supervisor and not facts.phase:
        return  # nobody hears a supervisor that has not said anything

    state, why = decide(facts)

    assert state in STATES
    if facts.phase in ("succeeded", "failed"):
        assert state == facts.phase
    if state in ("vanished", "unknown"):
        assert why


@given(FACTS)
def test_nobody_is_declared_dead_without_evidence(facts: Facts) -> None:
    state, _ = decide(facts)

    if state == "vanished":
        assert not facts.beats.supervisor
        is_gone = facts.answer is not None and facts.answer.kind in ("over", "forgotten")
        over = facts.answer is not None and facts.answer.job is not None and facts.answer.job.phase.is_over
        assert (facts.mode != "slurm" and facts.process == "gone") or (facts.mode in IN_JOBS and (is_gone or over))
