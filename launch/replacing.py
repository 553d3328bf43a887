"""What the supervisor does about a failed step: start it again, here or elsewhere, go on without it, or end the attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from launch.exclusions import exclude, excluded_nodes
from launch.fleet import Fleet
from launch.heartbeats import Silence
from launch.journal import Journal
from launch.restarts import RestartBook, another_place
from launch.stops import Stop
from launch.tracking import Tracked
from launch.verdict import Cause
from stages.desired import DesiredState, StepSpec
from stages.members import write_given_up
from stages.rundir import RunDir


@dataclass
class Waiting:
    """A step between its failure and its next start, which is at `spec`'s place."""

    spec: StepSpec
    due_s: float
    restarts: int
    reason: str


class Restarts:
    """One attempt's failed steps. `failure_grace_s` is what is left of a failed step's own grace."""

    def __init__(
        self,
        run: RunDir,
        fleet: Fleet,
        journal: Journal,
        silence: Silence,
        *,
        min_instances: int = 0,
        failure_grace_s: float = 5.0,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._fleet = fleet
        self._journal = journal
        self._silence = silence
        self._min_instances = min_instances
        self._failure_grace_s = failure_grace_s
        self._clock = clock
        self._book = RestartBook()
        self._waiting: dict[str, Waiting] = {}
        self._moved: dict[str, StepSpec] = {}
        self._given_up: dict[str, str] = {}

    # ---- what to start --------------------------------------------------------------------------------------------

    def to_start(self, desired: DesiredState) -> list[StepSpec]:
        """Steps that are missing and due, each at the place where it belongs now."""
        now_s, found = self._clock(), []
        for spec in desired.steps:
            waiting = self._waiting.get(spec.name)
            if spec.name in self._fleet.tracked or spec.name in self._given_up:
                continue
            if waiting is None or waiting.due_s <= now_s:
                found.append(self._moved.get(spec.name, spec))
        return found

    def started(self, name: str) -> None:
        self._waiting.pop(name, None)

    def reaped(self, name: str) -> bool:
        """The step has ended. False when it is none that waits for its next start, nor one that was given up."""
        if name in self._given_up:
            self._journal.step(name, state="lost", reason=self._given_up[name])
            return True
        waiting = self._waiting.get(name)
        if waiting is not None:
            self._journal.step(name, state="waiting", restarts=waiting.restarts, reason=waiting.reason)
        return waiting is not None

    # ---- after a failure ------------------------------------------------------------------------------------------

    def respond(self, item: Tracked, cause: Cause, desired: DesiredState) -> Cause | Stop | None:
        """None when the run goes on; else how the attempt ends."""
        lost = self._fleet.runner.find_lost(item.step)
        for host in lost:
            self._exclude(host, f"Slurm reported that it failed, under {item.spec.name}")
        if lost and cause.kind != "node":
            cause = replace(cause, kind="node", message=f"its node {', '.join(lost)} failed: {cause.message}")
        if item.spec.restart == "fatal" or desired.phase == "stop":
            return _end(cause, desired)
        if self._is_everywhere(item, cause, desired):
            return cause
        return self._again(item, cause, desired, self._fleet.runner.hosts(item.step))

    def not_started(self, spec: StepSpec, cause: Cause, desired: DesiredState) -> Cause | Stop | None:
        """As `respond`, for a step that could not even be started; when that was its first start, the plan is wrong."""
        number = self._fleet.starts(spec.name) - 1
        if spec.restart == "fatal" or number == 0:
            return cause
        wait_s = self._book.failed(spec, number)
        if wait_s is None:
            return self._without(spec, _used_up(spec, cause), desired)
        self._wait(spec, cause, wait_s, "")
        self.reaped(spec.name)
        return None

    def _again(self, item: Tracked, cause: Cause, desired: DesiredState, hosts: tuple[str, ...]) -> Cause | Stop | None:
        spec, host = item.spec, hosts[0] if len(hosts) == 1 else ""
        wait_s = self._book.failed(spec, item.step.incarnation.number, host)
        for bad in self._book.bad_nodes():
            self._exclude(bad, f"replacements failed on it, the last one of {spec.name}: {cause.message}")
        place = self._place(item, desired) if wait_s is not None else None
        if place is not None and wait_s is not None:
            self._moved[spec.name] = place
            self._wait(place, cause, wait_s, host)
            self._leave(item, cause)
            return None
        ending = self._without(spec, cause if wait_s is not None else _used_up(spec, cause), desired)
        if ending is None:
            self._leave(item, cause)
        return ending

    def _is_everywhere(self, item: Tracked, cause: Cause, desired: DesiredState) -> bool:
        """An instance that raises before any has served: the others will raise too, and so would its replacement."""
        names = [spec.name for spec in desired.steps if spec.is_service]
        return cause.kind == "error" and item.spec.is_service and not self._silence.any_served(names)

    def _without(self, spec: StepSpec, cause: Cause, desired: DesiredState) -> Cause | Stop | None:
        """It cannot be started again: go on with the others when they are enough."""
        others = [step.name for step in desired.steps if step.is_service and step.name != spec.name]
        left = [name for name in others if name not in self._given_up]
        if not spec.is_service or not 0 < self._min_instances <= len(left):
            return _end(cause, desired)
        self._given_up[spec.name] = cause.message
        self._waiting.pop(spec.name, None)
        write_given_up(self._run, self._given_up)
        self._journal.event("given_up", name=spec.name, reason=cause.message, left=len(left))
        return None

    def _place(self, item: Tracked, desired: DesiredState) -> StepSpec | None:
        """Where it goes next: where it was, unless that is gone or bad and another node has room."""
        spec, runner = item.spec, self._fleet.runner
        excluded = excluded_nodes(self._run)
        is_gone = runner.is_place_gone(item.step)
        if not is_gone and not any(host in excluded for host in runner.hosts(item.step)):
            return spec
        usable = [number for number, host in runner.usable_nodes(spec.component).items() if host not in excluded]
        running = [tracked.spec for tracked in self._fleet.tracked.values()]
        running += [waiting.spec for waiting in self._waiting.values()]
        other = another_place(spec, desired.steps, running, usable)
        return other if other is not None or is_gone else spec

    def _wait(self, place: StepSpec, cause: Cause, wait_s: float, host: str) -> None:
        restarts = self._book.count(place.name)
        self._waiting[place.name] = Waiting(place, self._clock() + wait_s, restarts, cause.message)
        self._journal.event(
            "restart",
            name=place.name,
            restarts=restarts,
            kind=cause.kind,
            reason=cause.message,
            wait_s=wait_s,
            host=host,
        )

    def _leave(self, item: Tracked, cause: Cause) -> None:
        """Whatever is left of it ends; one that hangs hears no TERM."""
        if item.is_alive:
            self._fleet.ask([item], 0.0 if cause.kind == "silent" else self._failure_grace_s)
        else:
            del self._fleet.tracked[item.spec.name]
            self.reaped(item.spec.name)

    def _exclude(self, host: str, reason: str) -> None:
        if exclude(self._run, host, reason):
            self._journal.event("excluded", node=host, reason=reason)


def _used_up(spec: StepSpec, cause: Cause) -> Cause:
    times = "it had been started again once"
    if spec.restart == "replace":
        times = f"it had been replaced {spec.max_restarts} times, as often as rollout.max_replacements allows"
    return replace(
        cause, message=f"{cause.message}\n({times})" if "\n" in cause.message else f"{cause.message}; {times}"
    )


def _end(cause: Cause, desired: DesiredState) -> Cause | Stop:
    """A lost node is no fault of the run: it goes on elsewhere, from its checkpoint."""
    if cause.kind != "node" or desired.phase == "stop":
        return cause
    return Stop("node_failure", str(cause), exit_code=cause.exit_code, cause=cause)
