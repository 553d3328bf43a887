"""The desired state: which steps should run where. The supervisor makes it so.

The launcher writes it first; the controller rewrites it to end the run. No other way leads to a started or stopped step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from stages.rundir import RunDir

PHASES = ("run", "stop")
OUTCOMES = ("success", "failure")
RESTARTS = ("fatal", "once", "replace")
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
"""Pauses before a failed step is started again: doubled each time, between these two."""
SERVICE_ROLES = frozenset({"rollout"})
"""Roles that run until they are asked to stop; every other role ends by itself when its work is done."""


class DesiredStateError(ValueError):
    """desired.json does not say what can be done."""


@dataclass(frozen=True)
class StepSpec:
    """One step of the job: `tasks` processes on `nodes` nodes, the first of them node number `node` of `component`.

    `gpus_per_node` is 0 for a step without GPUs; `mem_bytes` is per node, 0 shares all memory of the job there.
    `restart` says what the step's failure means: "fatal" ends the run; "once" and "replace" start it anew, at most
    `max_restarts` times within an attempt, and then end the run. `grace_s` is the time between TERM and KILL.
    """

    name: str
    role: str
    component: int
    node: int
    nodes: int
    tasks: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    mem_bytes: int = 0
    restart: str = "fatal"
    grace_s: float = 5.0
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if self.restart not in RESTARTS:
            raise DesiredStateError(f"restart of {self.name} is {self.restart!r}, wanted one of {RESTARTS}")
        if self.max_restarts < 0 or (self.restart == "fatal") is not (self.max_restarts == 0):
            raise DesiredStateError(
                f"restart of {self.name} is {self.restart!r} with {self.max_restarts} restarts; fatal has 0, others at least 1"
            )

    @property
    def is_service(self) -> bool:
        return self.role in SERVICE_ROLES


@dataclass(frozen=True)
class DesiredState:
    """`outcome` is None while phase is "run"; `reason` says why the run ends."""

    phase: str
    steps: tuple[StepSpec, ...]
    outcome: str | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise DesiredStateError(f"phase is {self.phase!r}, wanted one of {PHASES}")
        if (self.outcome in OUTCOMES) is not (self.phase == "stop") or (
            self.phase == "run" and self.outcome is not None
        ):
            raise DesiredStateError(
                f"phase {self.phase!r} with outcome {self.outcome!r}; stop needs one of {OUTCOMES}, run none"
            )
        names = [step.name for step in self.steps]
        if len(set(names)) != len(names):
            raise DesiredStateError(f"step names are not unique: {sorted(names)}")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "steps": [asdict(step) for step in self.steps]}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> DesiredState:
        """Inverse of `to_dict`; keys that a record adds (run id, attempt) are ignored. Raises DesiredStateError."""
        known = {spec.name for spec in fields(StepSpec)}
        try:
            steps = tuple(StepSpec(**{key: step[key] for key in step if key in known}) for step in record["steps"])
            return cls(record["phase"], steps, record["outcome"], record["reason"])
        except (KeyError, TypeError) as error:
            raise DesiredStateError(f"desired.json is incomplete: {error}") from error


def read_desired(run: RunDir) -> DesiredState | None:
    """The desired state of this attempt; None when it was not written yet. Raises DesiredStateError."""
    record = run.read(run.desired_json)
    return None if record is None else DesiredState.from_dict(record)


def write_desired(run: RunDir, state: DesiredState) -> None:
    run.write(run.desired_json, state.to_dict())


def replaceable(run: RunDir) -> frozenset[str]:
    """Names of the steps that the supervisor of this attempt starts again when they fail; empty when there is none to do so."""
    state = read_desired(run)
    return frozenset(step.name for step in state.steps if step.restart == "replace") if state else frozenset()


def end_run(run: RunDir, outcome: str, reason: str = "") -> None:
    """Ask the supervisor to end the run: what the controller does last. Raises DesiredStateError when there is none."""
    state = read_desired(run)
    if state is None:
        raise DesiredStateError(f"{run.desired_json} holds no desired state of attempt {run.attempt}")
    write_desired(run, replace(state, phase="stop", outcome=outcome, reason=reason))
