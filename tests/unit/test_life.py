"""Whether a followed run lives: Slurm is asked only when the run's files do not tell, and never often."""

from __future__ import annotations

import io
from datetime import datetime
from pathlib import Path

import pytest

from launch.display import LiveDisplay, PlainDisplay
from launch.life import DistantLife, LocalLife, Sign, SlurmLife
from launch.waiting import Pace
from stages.rundir import RunDir
from tests.fake_slurm import FakeSlurm, Job, short_looks, slurm_in_memory
from tests.made_runs import another_attempt, made

__all__ = ["short_looks", "slurm_in_memory"]
pytestmark = pytest.mark.usefixtures("slurm_in_memory", "short_looks")


class Hand:
    """A clock that the test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return made(tmp_path / "run")


@pytest.fixture
def clock() -> Hand:
    return Hand()


def life(clock: Hand) -> SlurmLife:
    return SlurmLife(clock=clock, now=clock, pace=Pace(clock=clock))


def looks(watcher: SlurmLife | DistantLife, run: RunDir, clock: Hand, seconds: float, beat: bool = False) -> list[Sign]:
    """What is seen in so many seconds, four looks in each; with `beat` the supervisor lives."""
    signs = []
    for number in range(int(seconds * 4)):
        state = {"phase": "running", "heartbeat": number} if beat else {}
        signs.append(watcher.look(run, state))
        clock.now_s += 0.25
    return signs


def news(signs: list[Sign]) -> list[str]:
    return [sign.words for sign in signs if sign.is_news]


def test_a_pending_job_is_news_once_and_again_with_its_place(
    run: RunDir, clock: Hand, slurm_in_memory: FakeSlurm
) -> None:
    slurm_in_memory.jobs[41] = Job("PENDING", "Priority", priority=50)
    slurm_in_memory.others = ["40|90|Resources"]

    said = news(looks(life(clock), run, clock, 60))

    assert said == [
        "job 41 is pending: Priority (other jobs come first)",
        "job 41 is pending: Priority (other jobs come first); 1 job comes first in partition gpu",
    ]


def test_another_reason_and_a_place_further_in_front_are_news(
    run: RunDir, clock: Hand, slurm_in_memory: FakeSlurm
) -> None:
    slurm_in_memory.jobs[41] = Job("PENDING", "Priority", priority=50)
    slurm_in_memory.others = ["40|90|Resources", "39|90|Resources"]
    watcher = life(clock)
    looks(watcher, run, clock, 10)

    slurm_in_memory.others = ["40|90|Resources"]
    assert "1 job comes first" in news(looks(watcher, run, clock, 60))[0]
    slurm_in_memory.jobs[41] = Job("PENDING", "Resources", priority=50)
    assert "waiting for free nodes" in news(looks(watcher, run, clock, 60))[0]


def test_slurm_is_asked_at_most_every_two_seconds_and_at_last_twice_a_minute(
    run: RunDir, clock: Hand, slurm_in_memory: FakeSlurm
) -> None:
    slurm_in_memory.jobs[41] = Job("PENDING", "Priority", priority=50)
    watcher = life(clock)

    looks(watcher, run, clock, 2)
    assert len(slurm_in_memory.calls) == 1
    looks(watcher, run, clock, 298)
    early = len(slurm_in_memory.calls)
    looks(watcher, run, clock, 600)

    assert early < 25
    assert len(slurm_in_memory.calls) - early <= 20


def test_a_run_that_beats_costs_no_question(run: RunDir, clock: Hand, slurm_in_memory: FakeSlurm) -> None:
    signs = looks(life(clock), run, clock, 3600, beat=True)

    assert {sign.kind for sign in signs} == {"running"}
    assert slurm_in_memory.calls == []


def test_a_supervisor_that_falls_silent_makes_slurm_be_asked(
    run: RunDir, clock: Hand, slurm_in_memory: FakeSlurm
) -> None:
    slurm_in_memory.jobs[41] = Job("NODE_FAIL")
    watcher = life(clock)
    looks(watcher, run, clock, 10, beat=True)
    silent = [watcher.look(run, {"phase": "running", "heartbeat": 39}) for _ in range(1)]
    clock.now_s += 5.0

    assert silent[0].kind == "running"
    assert watcher.look(run, {"phase": "running", "heartbeat": 39}).kind == "over"


def test_a_job_that_has_started_is_said_to_run_once(run: RunDir, clock: Hand, slurm_in_memory: FakeSlurm) -> None:
    slurm_in_memory.jobs[41] = Job("PENDING", "Resources")
    watcher = life(clock)
    looks(watcher, run, clock, 10)
    slurm_in_memory.jobs[41] = Job("RUNNING")

    assert news(looks(watcher, run, clock, 60)) == ["job 41 is running"]


def test_a_slurm_that_does_not_answer_is_unknown_and_said_once(
    run: RunDir, clock: Hand, slurm_in_memory: FakeSlurm
) -> None:
    slurm_in_memory.is_down = True

    signs = looks(life(clock), run, clock, 60)

    assert {sign.kind for sign in signs} == {"unknown"}
    assert len(news(signs)) == 1


def test_a_site_that_hides_the_queue_leaves_the_place_out(run: RunDir, clock: Hand, slurm_in_memory: FakeSlurm) -> None:
    slurm_in_memory.jobs[41] = Job("PENDING", "Priority", priority=0)

    assert news(looks(life(clock), run, clock, 30)) == ["job 41 is pending: Priority (other jobs come first)"]


def test_a_chained_attempt_is_asked_about_by_its_own_job(run: RunDir, clock: Hand, slurm_in_memory: FakeSlurm) -> None:
    slurm_in_memory.jobs = {41: Job("COMPLETED"), 42: Job("PENDING", "Dependency")}
    later = another_attempt(run, "chain", job_id="42")

    assert "job 42 is pending" in news(looks(life(clock), later, clock, 1))[0]


def test_a_start_estimate_that_moves_by_seconds_is_no_news(
    run: RunDir, clock: Hand, slurm_in_memory: FakeSlurm
) -> None:
    clock.now_s = datetime.fromisoformat("2026-11-30T11:00:00").timestamp()
    job = slurm_in_memory.jobs[41] = Job("PENDING", "Resources", start="2026-11-30T12:00:00", priority=0)
    watcher = life(clock)
    looks(watcher, run, clock, 10)
    job.start = "2026-11-30T12:00:30"

    assert news(looks(watcher, run, clock, 60)) == []
    job.start = "2026-11-30T14:00:00"
    assert len(news(looks(watcher, run, clock, 60))) == 1


# ---- local runs ----------------------------------------------------------------------------------------------------------


class Process:
    def __init__(self, *answers: tuple[str, str]) -> None:
        self._answers = list(answers)

    def poll(self) -> tuple[str, str]:
        return self._answers.pop(0)


def test_a_local_run_is_over_when_its_process_is(run: RunDir, clock: Hand) -> None:
    watcher = LocalLife(Process(("running", ""), ("failed", "supervisor: killed by SIGKILL")), clock)

    assert watcher.look(run, {}).kind == "running"
    clock.now_s += 1.1
    assert watcher.look(run, {}) == Sign("over", "supervisor: killed by SIGKILL")


def test_a_local_run_of_another_terminal_is_looked_for_when_it_is_silent(tmp_path: Path, clock: Hand) -> None:
    run = made(tmp_path / "local", "running", "local", host="login7")
    watcher = DistantLife(clock)

    assert {sign.kind for sign in looks(watcher, run, clock, 60, beat=True)} == {"running"}
    assert looks(watcher, run, clock, 10)[-1].kind == "unknown"


# ---- what is shown -------------------------------------------------------------------------------------------------------


def test_where_lines_stay_only_news_is_written() -> None:
    out = io.StringIO()
    display = PlainDisplay(out)

    display.waiting("pending: Priority", is_news=True)
    display.waiting("pending: Priority, in 1:00", is_news=False)
    display.waiting("", is_news=False)

    assert out.getvalue() == "pending: Priority\n"


def test_on_a_terminal_what_is_waited_for_is_drawn_in_place() -> None:
    from rich.console import Console

    display = LiveDisplay("first")
    console = Console(file=io.StringIO(), width=80)
    display._live.console = console

    display.waiting("pending: Priority", is_news=False)
    console.print(display._live.renderable)
    display.waiting("", is_news=False)
    drawn = str(console.file.getvalue())  # type: ignore[attr-defined]

    assert "pending: Priority" in drawn
