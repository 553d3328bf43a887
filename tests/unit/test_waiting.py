"""What squeue says to someone who waits: recorded outputs of 22.05, reasons in words, a polite pace."""

from __future__ import annotations

import itertools
import re
import time
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import waiting
from launch.slurm import JobPhase
from launch.waiting import Pace, QueuedJob, count_ahead, parse, reason_words, seconds, waiting_words
from tests.fake_slurm import FakeSlurm, Job, slurm_in_memory

__all__ = ["slurm_in_memory"]

# 22.05.8, `squeue -h -t all -o '%i|%T|%r|%N|%S|%L|%Q|%P'` with a job on three of four nodes and others behind it
RECORDED = """\
2|PENDING|Resources||2026-11-30T01:41:14|5:00|4294901758|dev
3+0|PENDING|Resources||2026-11-30T01:41:14|5:00|4294901757|dev
3+1|PENDING|Resources||2026-11-30T01:46:00|5:00|4294901756|dev
5|PENDING|BeginTime||2026-11-30T02:38:13|5:00|4294901755|dev
6|PENDING|Dependency||N/A|5:00|4294901754|dev
8|PENDING|Priority||2026-11-30T01:51:00|5:00|4294901753|dev
9|PENDING|Priority||2026-11-30T01:56:00|5:00|4294901752|dev
7|PENDING|JobHeldUser||N/A|5:00|0|dev
1|RUNNING|None|node[0-2]|2026-11-30T01:38:14|2:57|4294901759|dev
"""
# the same queue, `squeue -h -t PENDING -p dev -o '%i|%Q|%r'`
QUEUE = """\
2|4294901758|Resources
3+0|4294901757|Resources
3+1|4294901756|Resources
5|4294901755|BeginTime
6|4294901754|Dependency
8|4294901753|Priority
9|4294901752|Priority
7|0|JobHeldUser
"""
# 23.11, a node of the request is down; the reason has blanks and brackets. A job in two partitions, no time limit.
NOT_AVAILABLE = "50|PENDING|ReqNodeNotAvail, UnavailableNodes:gpu[07,09]||N/A|UNLIMITED|1000|gpu,long\n"


def local(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def job(**changes: object) -> QueuedJob:
    values = {"state": "PENDING", "reason": "Priority", "nodes": (), "start": None, "left_s": None}
    return QueuedJob(**{"job_id": 41, "priority": 50, "partitions": ("gpu",), **values, **changes})  # type: ignore[arg-type]


def test_a_pending_job_has_reason_and_expected_start() -> None:
    found = parse(RECORDED)[2]

    assert (found.reason, found.start, found.phase) == ("Resources", local("2026-11-30T01:41:14"), JobPhase.PENDING)
    assert (found.priority, found.partitions) == (4294901758, ("dev",))


def test_a_hetjob_starts_when_the_last_of_its_components_can() -> None:
    found = parse(RECORDED)[3]

    assert found.start == local("2026-11-30T01:46:00")


def test_a_hetjob_of_which_one_component_has_no_estimate_has_none() -> None:
    text = "3+0|PENDING|Priority||2026-11-30T01:41:14|5:00|7|dev\n3+1|PENDING|None||N/A|5:00|6|dev\n"

    assert parse(text)[3].start is None


def test_the_reason_of_a_hetjob_is_one_that_says_something() -> None:
    text = "3+0|PENDING|None||N/A|5:00|7|dev\n3+1|PENDING|Resources||N/A|5:00|6|dev\n"

    assert parse(text)[3].reason == "Resources"


def test_a_running_job_has_nodes_and_the_rest_of_its_time() -> None:
    found = parse(RECORDED)[1]

    assert (found.nodes, found.left_s) == (("node0", "node1", "node2"), 177.0)


def test_reasons_with_blanks_and_several_partitions_are_read() -> None:
    found = parse(NOT_AVAILABLE)[50]

    assert (found.partitions, found.left_s, found.start) == (("gpu", "long"), None, None)
    assert "down, drained or reserved" in reason_words(found.reason, 50)


def test_a_node_list_that_is_none_is_shown_as_it_is() -> None:
    assert parse("1|RUNNING|None|node[0|N/A|2:57|7|dev\n")[1].nodes == ("node[0",)


def test_other_lines_are_skipped() -> None:
    assert parse("slurm_load_jobs: warning\n\n12_[1-5]|PENDING|Priority||N/A|1:00|5|gpu\n") == {}


@pytest.mark.parametrize(
    ("number", "in_front"),
    [(2, 0), (3, 1), (8, 2), (9, 3)],
)
def test_jobs_of_higher_priority_come_first_and_a_hetjob_counts_once(number: int, in_front: int) -> None:
    assert count_ahead(QUEUE, parse(RECORDED)[number]) == in_front


def test_an_array_counts_once() -> None:
    assert count_ahead("7_[1-9]|100|Priority\n7_10|99|Resources\n41|50|Priority\n", job()) == 1


def test_a_held_job_has_no_place_in_the_queue(slurm_in_memory: FakeSlurm) -> None:
    assert waiting.ahead(job(priority=0, reason="JobHeldUser")) is None
    assert slurm_in_memory.calls == []


def test_the_queue_of_its_own_partitions_is_asked(slurm_in_memory: FakeSlurm) -> None:
    slurm_in_memory.others = ["40|90|Priority", "39|80|Resources"]

    assert waiting.ahead(job(partitions=("gpu", "long"))) == 2
    assert slurm_in_memory.calls[0][slurm_in_memory.calls[0].index("-p") + 1] == "gpu,long"


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("2:57", 177.0),
        ("1:02:03", 3723.0),
        ("2-01:00:00", 176400.0),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_slurms_durations(text: str, wanted: float | None) -> None:
    assert seconds(text) == wanted


@pytest.mark.parametrize(
    "reason",
    [
        *waiting.REASONS,
        "QOSMaxJobsPerUserLimit",
        "AssocGrpGRES",
        "MaxNodePerAccount",
        "launch failed requeued held",
        "job requeued in held state",
    ],
)
def test_every_reason_that_we_know_has_words_without_placeholders(reason: str) -> None:
    words = reason_words(reason, 41)

    assert re.search(r"\(.+\)$", words)
    assert "{" not in words


def test_a_reason_that_nobody_documents_is_shown_as_it_is() -> None:
    assert reason_words("BrandNewReason", 41) == "BrandNewReason"


def test_words_hold_reason_place_and_estimate() -> None:
    now = local("2026-11-30T12:00:00")

    words = waiting_words(job(start=now + 4200), 3, now)

    for part in ("Priority (other jobs come first)", "3 jobs come first in partition gpu", "at 13:10, in 1:10:00"):
        assert part in words


def test_an_estimate_of_another_day_has_its_date() -> None:
    now = local("2026-11-30T12:00:00")

    assert "Wed 02 Dec 12:00" in waiting.start_words(now + 48 * 3600, now)


def test_an_estimate_in_the_past_means_any_moment() -> None:
    assert waiting.start_words(10.0, 20.0) == "Slurm expects it to start any moment"


def test_one_question_serves_all_jobs_and_leaves_out_what_slurm_does_not_know(slurm_in_memory: FakeSlurm) -> None:
    slurm_in_memory.jobs = {41: Job("RUNNING", nodes="node0"), 43: Job("PENDING", "Priority")}

    assert set(waiting.queued(["41", 42, 43])) == {41, 43}
    assert waiting.queued([99]) == {}
    assert slurm_in_memory.asked("squeue") == 2


def test_no_job_is_no_question(slurm_in_memory: FakeSlurm) -> None:
    assert waiting.queued([]) == {}
    assert slurm_in_memory.calls == []


@pytest.mark.parametrize(
    "printed, words",
    [
        ("NODE_FAIL|0:1\n", "is NODE_FAIL"),
        ("FAILED|0:9\n", "FAILED, killed by SIGKILL"),
        ("FAILED|7:0\nFAILED|7:0\n", "exit code 7"),
    ],
)
def test_accounting_in_words(slurm_in_memory: FakeSlurm, printed: str, words: str) -> None:
    slurm_in_memory.accounting[41] = printed

    assert words in waiting.verdict(41)


def test_without_accounting_there_is_no_verdict(slurm_in_memory: FakeSlurm) -> None:
    assert waiting.verdict(41) == ""


class Hand:
    """A clock that the test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_questions_are_at_least_two_seconds_apart_and_at_last_half_a_minute() -> None:
    clock = Hand()
    pace = Pace(clock=clock)
    asked: list[float] = []
    while clock.now_s < 1600.0:
        if pace.due():
            asked.append(clock.now_s)
        clock.now_s += 0.25
    gaps = [after - before for before, after in itertools.pairwise(asked)]

    assert gaps[0] >= 2.0
    assert gaps == sorted(gaps)
    assert 30.0 <= gaps[-1] <= 30.25
    assert len(asked) < 35


def test_after_news_the_pace_begins_anew_but_never_faster_than_its_first() -> None:
    clock = Hand()
    pace = Pace(clock=clock)
    for _ in range(20):
        clock.now_s += 40.0
        assert pace.due()
    pace.hurry()

    clock.now_s += 1.9
    assert not pace.due()
    clock.now_s += 0.2
    assert pace.due()


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=60), st.lists(st.booleans(), min_size=60, max_size=60))
def test_the_pace_is_never_faster_than_its_first_interval(steps: list[float], news: list[bool]) -> None:
    clock = Hand()
    pace, last_s = Pace(2.0, 30.0, clock=clock), float("-inf")
    for step, is_news in zip(steps, news, strict=False):
        clock.now_s += step
        if is_news:
            pace.hurry()
        if pace.due():
            assert clock.now_s - last_s >= 2.0
            last_s = clock.now_s


def test_times_are_those_of_this_machine() -> None:
    assert waiting.when("2026-11-30T01:41:14") == time.mktime((2026, 11, 30, 1, 41, 14, 0, 0, -1))
    assert waiting.when("N/A") is None
    assert waiting.when("soon") is None
