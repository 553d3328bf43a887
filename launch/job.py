"""The job that a supervisor runs in, as it sees it: how long it lasts, what a TERM means, how the run goes on after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.errors import LibraError
from launch.stops import Requeued, Stop


class RestartRefusedError(LibraError):
    """The run cannot go on by itself; the message says why, and what a person can do."""


@dataclass(frozen=True)
class Termination:
    """What a TERM means: kind "cancelled", "preempted", "node_failure", "time_limit" or "requeued" (by an administrator).

    `is_requeued`: Slurm will run the job again.
    """

    kind: str
    is_requeued: bool = False


CANCELLED = Termination("cancelled")


class Job:
    """A local run: it has no limit, TERM ends it, and nobody starts it again but a person."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id

    @property
    def limit_s(self) -> float:
        """Of the whole job."""
        return math.inf

    def time_left_s(self, *, exactly: bool = False) -> float:
        """Until Slurm ends the job, as of the last time it was asked; `exactly` asks now. Never raises."""
        return math.inf

    def why_term(self) -> Termination:
        """What the TERM means that has come. Never raises."""
        return CANCELLED

    def is_ending(self) -> bool:
        """Is somebody else ending the job, whose TERM may reach the steps before it reaches the supervisor? Never raises."""
        return False

    def go_on(self, stop: Stop) -> Requeued:
        """Have the run go on after this attempt. Raises RestartRefusedError."""
        raise RestartRefusedError("a local run is not started again by itself; go on with: python -m launch.resume RUN")

    def hand_over(self) -> None:
        """The last word of this attempt has been said, and the run goes on: from now on the next attempt may write."""
