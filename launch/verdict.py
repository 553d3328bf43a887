"""What a step's end means: success, or a cause in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from launch.slurm import signal_name
from launch.steps import Incarnation, Step, StepStatus, exception_text, tail, without_plumbing

SETTLE_S = {"signal": 0.0, "error": 0.3, "stopped": 1.0, "ended": 1.0}
"""How long a failure is held back before it counts as the run's cause, by kind.

A killed process makes others fail a moment later, and srun may report those first; a task that left because of a TERM that
was not ours is usually the first sign of a cancelled job or component.
"""


@dataclass(frozen=True)
class Cause:
    """Why a run failed. `message` does not repeat the step; `exit_code` is the stage's own (128 + n for signal n)."""

    step: str
    kind: str
    message: str
    exit_code: int = 1
    log_tail: str = ""

    def __str__(self) -> str:
        return f"{self.step}: {self.message}"


@dataclass(frozen=True)
class Success:
    results: dict[int, Any] = field(default_factory=dict)

    @property
    def was_stopped(self) -> bool:
        """Did any task leave because it was asked to?"""
        return any(isinstance(value, dict) and value.get("stopped") is True for value in self.results.values())


def judge(step: Step, status: StepStatus, waited_s: float, result_wait_s: float) -> Success | Cause | None:
    """The verdict on a step, None while it is open.

    One failed task decides at once, also while others still run. `waited_s` is the time since the step ended; a missing
    result becomes a failure after `result_wait_s`.
    """
    incarnation = step.incarnation
    if status.lost_nodes:
        return Cause(incarnation.spec.name, "node", f"its node {', '.join(status.lost_nodes)} failed")
    if any(status.exits.values()):
        return _failed(incarnation, status)
    if not status.ended:
        return None
    results = incarnation.results()
    missing = [rank for rank in range(step.spec.tasks) if rank not in results]
    if missing and waited_s < result_wait_s:
        return None
    if missing:
        what = f"{_who(incarnation, missing[0])}ended with exit code 0 but without a result"
        return _cause(incarnation, missing[0], "error", f"{what}{_note(status)}", 1)
    errors = sorted(rank for rank, (outcome, _) in results.items() if outcome != "success")
    if errors:
        words = exception_text(str(results[errors[0]][1]).splitlines())
        return _cause(incarnation, errors[0], "error", f"{_who(incarnation, errors[0])}failed: {words}", 1)
    return Success({rank: value for rank, (_, value) in results.items()})


def _failed(incarnation: Incarnation, status: StepStatus) -> Cause:
    """A killed task before one that failed: the second is mostly the consequence of the first."""
    failed = {rank: code for rank, code in status.exits.items() if code != 0}
    rank = min(failed, key=lambda candidate: (failed[candidate] > 0, candidate))
    code = failed[rank]
    if code < 0:
        return _cause(
            incarnation, rank, "signal", f"{_who(incarnation, rank)}killed by {signal_name(-code)}", 128 - code
        )
    words = _exception(incarnation, rank, code)
    message = f"{_who(incarnation, rank)}exited {code}{f': {words}' if words else _note(status)}"
    return _cause(incarnation, rank, "error", message, code)


def _exception(incarnation: Incarnation, rank: int, code: int) -> str:
    """From the result pickle, else from the log; only exit code 1 can be an uncaught exception."""
    outcome, value = incarnation.results().get(rank, ("", ""))
    if outcome == "error":
        return exception_text(str(value).splitlines())
    return exception_text(tail(incarnation.log(rank), lines=200)) if code == 1 else ""


def _who(incarnation: Incarnation, rank: int) -> str:
    return f"rank {rank} " if incarnation.spec.tasks > 1 else ""


def _note(status: StepStatus) -> str:
    return f" ({status.note})" if status.note else ""


def _cause(incarnation: Incarnation, rank: int, kind: str, message: str, exit_code: int) -> Cause:
    return Cause(
        incarnation.spec.name,
        kind,
        message,
        exit_code,
        "\n".join(without_plumbing(tail(incarnation.log(rank), lines=60))[-30:]),
    )
