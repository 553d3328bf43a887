"""Which of the steps' ends is the run's failure. Pure decisions over what the supervisor has seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from launch.steps import Step, StepStatus
from launch.verdict import SETTLE_S, Cause, Success
from stages.desired import DesiredState, StepSpec


@dataclass
class Tracked:
    """A step that was started. All times are of the supervisor's clock.

    `asked_s`: when it was asked to stop, with `grace_s` to do so; `seen_s`: when its verdict was first seen; `killed_s`: of the last KILL.
    """

    step: Step
    asked_s: float | None = None
    grace_s: float = 0.0
    ended_s: float | None = None
    seen_s: float | None = None
    killed_s: float | None = None
    verdict: Success | Cause | None = None
    status: StepStatus = field(default_factory=lambda: StepStatus(ended=False))

    @property
    def spec(self) -> StepSpec:
        return self.step.spec

    @property
    def is_alive(self) -> bool:
        return self.ended_s is None

    @property
    def is_open(self) -> bool:
        """May its verdict still change? A failure may get a better explanation while it settles."""
        return self.is_alive or not isinstance(self.verdict, Success)

    def is_overdue(self, now_s: float, again_s: float) -> bool:
        """Was it asked to stop, has outlived its grace, and had no KILL within `again_s`?"""
        if not self.is_alive or self.asked_s is None or now_s - self.asked_s < self.grace_s:
            return False
        return self.killed_s is None or now_s - self.killed_s >= again_s


def failures(tracked: Iterable[Tracked], desired: DesiredState, now_s: float) -> list[tuple[Cause, Tracked]]:
    """All failures that have settled: killed processes before those that failed, then the earliest first."""
    found: list[tuple[bool, float, Cause, Tracked]] = []
    for item in tracked:
        cause = failure_of(item, desired)
        if cause is not None and item.seen_s is not None and now_s - item.seen_s >= SETTLE_S.get(cause.kind, 0.0):
            found.append((cause.kind != "signal", item.seen_s, cause, item))
    return [(cause, item) for _, _, cause, item in sorted(found, key=lambda entry: entry[:2])]


def failure_of(tracked: Tracked, desired: DesiredState) -> Cause | None:
    """Why the run cannot go on with what this step did; None while it is fine.

    A rollout instance must run until it is asked to stop; the controller must end the run before it ends. Once the run is
    declared a success, only trainer and controller count.
    """
    if tracked.asked_s is not None or tracked.verdict is None:
        return None
    spec, verdict = tracked.spec, tracked.verdict
    over = desired.phase == "stop" and desired.outcome == "success"
    if over and spec.is_service:
        return None
    if isinstance(verdict, Cause):
        return verdict
    if verdict.was_stopped:
        return Cause(spec.name, "stopped", "was stopped from outside (a SIGTERM that the run did not send)")
    if not over and (spec.is_service or spec.role == "controller"):
        return Cause(spec.name, "ended", "ended although the run was not over")
    return None


def unfinished(tracked: dict[str, Tracked], desired: DesiredState) -> list[str]:
    """Steps that end by themselves (trainer, controller) and have not ended well yet, in the order of the desired state."""
    names = [spec.name for spec in desired.steps if not spec.is_service]
    return [name for name in names if name not in tracked or not isinstance(tracked[name].verdict, Success)]
