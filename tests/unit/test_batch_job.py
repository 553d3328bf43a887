"""What a supervisor learns from Slurm about its own job, and how it asks for the next one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from launch import slurm
from launch.batch_job import ASK_S, QUICK_S, BatchJob, parse_facts
from launch.chain import Chained
from launch.job import CANCELLED, Job, RestartRefusedError, Termination
from launch.stops import Requeued, Stop
from stages.rundir import RunDir

RUNNING = (
    "JobId=41 HetJobId=41 HetJobOffset=0 JobName=p HetJobIdSet=41-42 UserId=me(1) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0"
    " ExitCode=0:0 RunTime=00:00:06 TimeLimit=00:05:00 TimeMin=N/A SubmitTime=2026-11-30T01:39:36"
    " StartTime=2026-11-30T01:39:36 EndTime=2026-11-30T01:44:36 Deadline=N/A PreemptEligibleTime=2026-11-30T01:39:36"
    " PreemptTime=None Comment=EndTime=1999 NodeList=node0\n"
    "JobId=42 HetJobId=41 HetJobOffset=1 Restarts=7 StartTime=2026-11-30T01:39:36 EndTime=2026-11-30T09:44:36\n"
)
END = datetime(2026, 11, 30, 1, 44, 36).timestamp()
LIMIT = Stop("time_limit", "the time limit is near (USR1)", exit_code=124)


class FakeSlurm:
    """Answers `slurm.command` from a table; a str is stdout, an exception is raised. Remembers what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, str | Exception] = {"show": RUNNING, "requeue": "", "update": ""}
        self.asked: list[list[str]] = []
        monkeypatch.setattr(slurm, "command", self.command)

    def command(self, arguments: list[str], timeout_s: float = 10.0) -> str:
        self.asked.append(list(arguments))
        answer = next(value for key, value in self.answers.items() if key in arguments)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def refuse() -> Chained:
    raise slurm.SlurmCommandError("sbatch failed (1): no more jobs for you")


def job(
    run: RunDir,
    *,
    how: str = "auto",
    restarts: int = 0,
    chain: Callable[[], Chained] = refuse,
    excluded: tuple[str, ...] = (),
    clock: Callable[[], float] = time.monotonic,
    wall_s: float = END - 100.0,
) -> BatchJob:
    return BatchJob(run, "41", restarts, how, chain, lambda: excluded, clock=clock, wall=lambda: wall_s)


def test_the_leaders_record_counts_and_its_first_words(fake: FakeSlurm) -> None:
    facts = parse_facts(RUNNING)

    assert facts is not None
    assert (facts.end, facts.restarts, facts.preempted) == (END, 0, None)


@pytest.mark.parametrize(
    "state, is_ending",
    [("RUNNING", False), ("COMPLETING", True), ("CANCELLED", True), ("NODE_FAIL", True), ("SUSPENDED", False)],
)
def test_a_job_is_being_ended_from_completing_on(fake: FakeSlurm, run: RunDir, state: str, is_ending: bool) -> None:
    fake.answers["show"] = RUNNING.replace("UserId=me(1)", f"UserId=me(1) JobState={state}")

    assert job(run).is_ending() is is_ending


def test_a_slurm_that_does_not_answer_ends_no_job(fake: FakeSlurm, run: RunDir) -> None:
    fake.answers["show"] = slurm.SlurmCommandError("scontrol did not answer within 3 s")

    assert not job(run).is_ending()


def test_text_that_is_no_job_is_none() -> None:
    assert parse_facts("slurm_load_jobs error: Invalid job id specified\n") is None


def test_the_time_left_counts_to_slurms_end(fake: FakeSlurm, run: RunDir) -> None:
    found = job(run)

    assert found.time_left_s() == pytest.approx(100.0)
    assert found.limit_s == pytest.approx(300.0)


def test_slurm_is_asked_once_a_minute_and_when_it_matters(fake: FakeSlurm, run: RunDir) -> None:
    now_s = 0.0
    found = job(run, clock=lambda: now_s)
    for _ in range(int(ASK_S)):
        found.time_left_s()
        now_s += 1.0
    before = len(fake.asked)
    found.time_left_s(exactly=True)

    assert (before, len(fake.asked)) == (1, 2)


def test_a_limit_that_somebody_moved_is_noticed(fake: FakeSlurm, run: RunDir) -> None:
    found = job(run)
    found.time_left_s()
    fake.answers["show"] = RUNNING.replace("EndTime=2026-11-30T01:44:36", "EndTime=2026-11-30T01:54:36")

    assert found.time_left_s(exactly=True) == pytest.approx(700.0)


def test_a_slurm_that_does_not_answer_leaves_what_was_known(fake: FakeSlurm, run: RunDir) -> None:
    found = job(run)
    found.time_left_s()
    fake.answers["show"] = slurm.SlurmCommandError("scontrol did not answer within 10 s")

    assert found.time_left_s(exactly=True) == pytest.approx(100.0)
    assert job(run).time_left_s() == math.inf


def test_a_controller_that_stops_answering_holds_the_supervisor_up_for_a_moment_only(
    fake: FakeSlurm, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = BatchJob(run, "41", 0, "auto", refuse, wall=lambda: END - 100.0)
    job.time_left_s()
    given: list[float] = []

    def silent(_words: list[str], timeout_s: float = 10.0) -> str:
        given.append(timeout_s)
        raise slurm.SlurmCommandError("scontrol did not answer")

    monkeypatch.setattr(slurm, "command", silent)

    assert job.time_left_s(exactly=True) == pytest.approx(100.0)
    assert given == [QUICK_S]


def test_a_job_without_a_limit_never_ends(fake: FakeSlurm, run: RunDir) -> None:
    fake.answers["show"] = RUNNING.replace("EndTime=2026-11-30T01:44:36", "EndTime=Unknown")

    assert job(run).time_left_s() == math.inf


NODE = "*** JOB 41 ON node0 CANCELLED AT 1 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"


@pytest.mark.parametrize(
    "change, log, why",
    [
        (("Restarts=0", "Restarts=0"), "*** JOB 41 ON node0 CANCELLED AT 1 ***", CANCELLED),
        (("Restarts=0", "Restarts=1"), "*** JOB 41 ... DUE TO JOB REQUEUE ***", Termination("requeued", True)),
        (("Restarts=0", "Restarts=1"), NODE, Termination("node_failure", True)),
        (("Restarts=0", "Restarts=0"), NODE, Termination("node_failure", False)),
        (("PreemptTime=None", "PreemptTime=2026-11-30T01:44:06"), "", Termination("preempted")),
        (("Restarts=0", "Restarts=1"), "*** JOB 41 ... DUE TO PREEMPTION ***", Termination("preempted", True)),
        (
            ("EndTime=2026-11-30T01:44", "EndTime=2026-11-30T01:42"),
            "... DUE TO TIME LIMIT ***",
            Termination("time_limit"),
        ),
    ],
)
def test_slurm_knows_what_a_term_means(
    fake: FakeSlurm, run: RunDir, change: tuple[str, str], log: str, why: Termination
) -> None:
    fake.answers["show"] = RUNNING.replace(*change, 1)
    found = job(run)
    (run.logs / "supervisor.log").write_text(log + "\n")

    assert found.why_term() == why


def test_the_end_of_an_earlier_run_of_the_job_says_nothing_about_this_one(fake: FakeSlurm, run: RunDir) -> None:
    (run.logs / "supervisor.log").write_text(NODE + "\n")
    found = job(run)
    with (run.logs / "supervisor.log").open("a") as log:
        log.write("*** JOB 41 ON node0 CANCELLED AT 1 ***\n")

    assert found.why_term() == CANCELLED


def test_a_job_that_was_run_again_before_is_not_requeued_for_that(fake: FakeSlurm, run: RunDir) -> None:
    fake.answers["show"] = RUNNING.replace("Restarts=0", "Restarts=2", 1)

    assert job(run, restarts=2).why_term() == CANCELLED


def test_a_term_that_slurm_says_nothing_about_is_a_cancel(fake: FakeSlurm, run: RunDir) -> None:
    fake.answers["show"] = slurm.SlurmCommandError("scontrol did not answer within 3 s")

    assert job(run).why_term() == CANCELLED


def test_a_job_is_requeued_by_its_leader(fake: FakeSlurm, run: RunDir) -> None:
    assert job(run).go_on(LIMIT) == Requeued("requeue", LIMIT.reason, "41")
    assert fake.asked == [["scontrol", "requeue", "41"]]


def test_bad_nodes_are_kept_from_the_job_that_runs_again(fake: FakeSlurm, run: RunDir) -> None:
    found = job(run, excluded=("node3", "node7"))

    found.go_on(LIMIT)
    found.hand_over()

    assert fake.asked[-1] == ["scontrol", "update", "JobId=41", "ExcNodeList=node3,node7"]


def test_a_requeue_whose_nodes_cannot_be_excluded_is_still_one(fake: FakeSlurm, run: RunDir) -> None:
    fake.answers["update"] = slurm.SlurmCommandError("scontrol failed (1): Access denied")

    found = job(run, excluded=("node3",))

    assert found.go_on(LIMIT).how == "requeue"
    found.hand_over()


def test_where_requeueing_is_refused_a_job_follows(fake: FakeSlurm, run: RunDir) -> None:
    fake.answers["requeue"] = slurm.SlurmCommandError("scontrol failed (1): Requested operation is presently disabled")
    folder = run.root / "attempts" / ".next"
    folder.mkdir()
    found = job(run, chain=lambda: Chained("52", folder, run.root / "attempts" / "1"))

    assert found.go_on(LIMIT) == Requeued("chain", LIMIT.reason, "52")
    assert run.newest_attempt() == 0, "the last word has yet to be said"
    found.hand_over()
    assert run.newest_attempt() == 1


def test_a_held_job_may_start_once_its_folder_has_its_name(
    fake: FakeSlurm, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, later = run.root / "attempts" / ".next", run.root / "attempts" / "1"
    folder.mkdir()
    seen: list[tuple[list[str], bool]] = []

    def command(words: list[str], timeout_s: float = 10.0) -> str:
        seen.append((list(words), later.exists()))
        return ""

    monkeypatch.setattr(slurm, "command", command)
    found = job(run, how="chain", chain=lambda: Chained("52", folder, later, is_held=True))
    found.go_on(LIMIT)

    found.hand_over()

    assert seen == [(["scontrol", "release", "52"], True)]


def test_a_held_job_that_cannot_be_released_is_said(
    fake: FakeSlurm, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["release"] = slurm.SlurmCommandError("scontrol did not answer within 60 s")
    folder = run.root / "attempts" / ".next"
    folder.mkdir()
    found = job(run, how="chain", chain=lambda: Chained("52", folder, run.root / "attempts" / "1", is_held=True))
    found.go_on(LIMIT)

    found.hand_over()

    assert "job 52 is held; run: scontrol release 52 (scontrol did not answer within 60 s)" in capsys.readouterr().out


def test_a_chain_does_not_try_to_requeue(fake: FakeSlurm, run: RunDir) -> None:
    with pytest.raises(RestartRefusedError, match="no job could be submitted: sbatch failed"):
        job(run, how="chain").go_on(LIMIT)

    assert fake.asked == []


@pytest.mark.parametrize(
    "how, words",
    [
        ("never", "slurm.requeue=never; go on with: python -m launch.resume RUN"),
        ("requeue", "presently disabled; set slurm.requeue=chain"),
        ("auto", "presently disabled; no job could be submitted: sbatch failed"),
    ],
)
def test_a_run_that_cannot_go_on_by_itself_says_why_and_how_it_can(
    fake: FakeSlurm, run: RunDir, how: str, words: str
) -> None:
    fake.answers["requeue"] = slurm.SlurmCommandError("scontrol failed (1): Requested operation is presently disabled")

    with pytest.raises(RestartRefusedError, match=words.replace("(", r"\(").replace(")", r"\)")):
        job(run, how=how).go_on(LIMIT)


def test_a_local_run_is_started_again_by_people_only() -> None:
    local = Job("77")

    assert (local.time_left_s(), local.why_term()) == (math.inf, CANCELLED)
    with pytest.raises(RestartRefusedError, match=r"launch\.resume"):
        local.go_on(LIMIT)
