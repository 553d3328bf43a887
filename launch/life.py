"""Does a run that is being followed still live, and what does it wait for? Asked only when its files do not tell.

While the supervisor's heartbeat moves, nobody is asked: a followed run costs the cluster's controller no query.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from launch import slurm, waiting
from launch.runs import Folder
from launch.slurm import JobPhase
from launch.truth import SILENT_S, Answer, Stillness, ask, tell_one
from launch.waiting import Pace, QueuedJob
from stages.rundir import RunDir


class HandedOverError(Exception):
    """This attempt is over, and the run goes on in another one, of which the process that followed has no part."""


LOCAL_INTERVAL_S = 1.0
MOVED_SHARE = 0.1
MOVED_LEAST_S = 60.0
"""A start estimate that moved less is no news: Slurm makes a new one every minute."""


@dataclass(frozen=True)
class Sign:
    """kind: "waiting", "running", "over" or "unknown". `is_news`: worth a line of its own where lines stay."""

    kind: str
    words: str = ""
    is_news: bool = False


RUNNING = Sign("running")


class Life(Protocol):
    def look(self, run: RunDir, state: Mapping[str, Any]) -> Sign:
        """Called several times a second with the newest attempt and its state.json; paces its own questions."""
        ...


class SlurmLife:
    """Asks squeue while the job waits and when the supervisor is silent: first every 2 s, at last every 30 s."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        pace: Pace | None = None,
    ) -> None:
        self._now = now
        self._stillness, self._pace = Stillness(clock), pace or Pace(clock=clock)
        self._sign = Sign("unknown")
        self._said: QueuedJob | None = None
        self._in_front: int | None = None
        self._said_in_front: int | None = None
        self._counts_next = False
        self._news = (-1, False)

    def look(self, run: RunDir, state: Mapping[str, Any]) -> Sign:
        is_waiting = state.get("phase", "") in ("", "requeued")
        is_silent = self._stillness.so_far_s(run.attempt, state) > SILENT_S
        news = (run.attempt, is_waiting and run.cancel_json.exists())  # may lag on NFS: it only hurries
        if news != self._news:
            self._news = news
            self._pace.hurry()
        if not (is_waiting or is_silent):
            self._sign, self._said = RUNNING, None
        elif self._pace.due():
            self._sign = self._asked(run)
            return self._sign
        return Sign(self._sign.kind, self._sign.words)

    def _asked(self, run: RunDir) -> Sign:
        """One query at a time: of the job, and in between of the jobs in front of it."""
        if self._counts_next and self._said is not None:
            self._counts_next = False
            try:
                self._in_front = waiting.ahead(self._said)
            except slurm.SlurmCommandError:
                self._in_front = None  # a site may not show others' jobs
            return self._waiting(self._said)
        self._counts_next = True
        job_id = Folder(run).job_id or tell_one(run.root).folder.job_id
        if not job_id.isdigit():
            return Sign("unknown")
        return self._sign_of(job_id, ask({job_id})[job_id])

    def _sign_of(self, job_id: str, answer: Answer) -> Sign:
        if answer.kind == "silent":
            return Sign("unknown", f"Slurm does not answer: {answer.text}", is_news=answer.text not in self._sign.words)
        if answer.job is None:
            return Sign("over", answer.text or f"Slurm does not know job {job_id} any more")
        if answer.job.phase is JobPhase.PENDING:
            return self._waiting(answer.job)
        self._said = None
        return Sign("running", f"job {job_id} is {answer.job.state.lower()}", is_news=self._sign.kind != "running")

    def _waiting(self, job: QueuedJob) -> Sign:
        words = waiting.waiting_words(job, self._in_front, self._now())
        is_news = self._is_news(job)
        if is_news or self._said is None:
            self._said, self._said_in_front = job, self._in_front
        return Sign("waiting", f"job {job.job_id} is pending: {words}", is_news)

    def _is_news(self, job: QueuedJob) -> bool:
        said = self._said
        if said is None or (job.reason, self._in_front) != (said.reason, self._said_in_front):
            return True
        if job.start is None or said.start is None:
            return job.start is not said.start
        return abs(job.start - said.start) > max(MOVED_LEAST_S, MOVED_SHARE * abs(job.start - self._now()))


class Poller(Protocol):
    """What `LocalSubmission` is to its launcher."""

    def poll(self) -> tuple[str, str]: ...


class LocalLife:
    """A run that this process has started."""

    def __init__(self, submission: Poller, clock: Callable[[], float] = time.monotonic) -> None:
        self._submission = submission
        self._pace = Pace(LOCAL_INTERVAL_S, LOCAL_INTERVAL_S, clock=clock)
        self._sign = RUNNING

    def look(self, run: RunDir, state: Mapping[str, Any]) -> Sign:
        if self._pace.due():
            status, reason = self._submission.poll()
            self._sign = Sign("over", reason) if status in ("succeeded", "failed") else RUNNING
        return self._sign


class DistantLife:
    """A local run that another process has started: its supervisor is looked for when it is silent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._stillness, self._pace = Stillness(clock), Pace(5.0, 30.0, clock=clock)
        self._sign = RUNNING

    def look(self, run: RunDir, state: Mapping[str, Any]) -> Sign:
        if self._stillness.so_far_s(run.attempt, state) <= SILENT_S:
            self._sign = RUNNING
        elif self._pace.due():
            truth = tell_one(run.root)
            is_news = truth.why != self._sign.words
            kind = "running" if truth.is_alive else "unknown" if truth.state == "unknown" else "over"
            self._sign = Sign(kind, truth.why, is_news=is_news)
            return self._sign
        return Sign(self._sign.kind, self._sign.words)
