"""Ends of an attempt that are no failure: why it stops, how long the checkpoint may take, what comes after.

The numbers come from what the trainer measured (the manifest of its newest checkpoint), so that a model that is saved in half a
second does not wait like one that takes ten minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.verdict import Cause

LEAST_GRACE_S = 30.0
UNMEASURED_GRACE_S = 120.0
"""For the checkpoint of a run that has not saved one yet, so that nobody knows how long it takes."""
SLACK_S = 60.0
"""Beyond saving: agreeing on it, the next step's boundary, ending the steps, asking for the requeue."""


@dataclass(frozen=True)
class Stop:
    """A planned end of the attempt, with a checkpoint first.

    kind: "time_limit", "preempted", "node_failure", "requeued" (by an administrator) or "cancelled". `again`: the run goes on in
    another attempt; `is_requeued`: Slurm has already seen to that. `is_late`: Slurm ends the job already. `cause` is what made
    it necessary, when that is a step's failure; it is the run's cause if the run cannot go on.
    """

    kind: str
    reason: str
    again: bool = True
    exit_code: int = 1
    is_requeued: bool = False
    is_late: bool = False
    cause: Cause | None = None

    def failed(self, why: str) -> Cause:
        """The run's cause when it ends here after all."""
        if self.cause is not None:
            return Cause(
                self.cause.step, self.cause.kind, f"{self.cause.message}; {why}", self.exit_code, self.cause.log_tail
            )
        return Cause("supervisor", self.kind, f"{self.reason}; {why}", self.exit_code)


@dataclass(frozen=True)
class Requeued:
    """The attempt is over and the run goes on. how: "requeue", "chain" (`job_id` is the next job), or "slurm" (by itself)."""

    how: str
    reason: str
    job_id: str


@dataclass(frozen=True)
class Measured:
    """Seconds to save a checkpoint, and of a usual step, as the trainer measured them."""

    save_s: float
    step_s: float


def grace_s(measured: Measured | None) -> float:
    """How long trainer and controller may take from the stop request to their end."""
    if measured is None:
        return UNMEASURED_GRACE_S
    return max(LEAST_GRACE_S, 3 * measured.save_s + 2 * measured.step_s)


def lead_s(measured: Measured | None, limit_s: float) -> float:
    """How long before the end of the allocation the supervisor asks by itself. A short job (`limit_s`) keeps most of its time.

    0 without a measurement: then the signal before the limit (USR1) decides.
    """
    if measured is None:
        return 0.0
    return 2 * measured.save_s + 2 * measured.step_s + min(SLACK_S, limit_s / 4)
