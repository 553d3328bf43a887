"""The rollout instances as their registrations show them, and which one gets the next request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.plan import InstancePlacement
from stages.rundir import RunDir
from stages.weights.instances import InstanceStatus, read_status

LOOK_PERIOD_S = 0.1
COOL_DOWN_S = 0.5
LONGEST_COOL_DOWN_S = 8.0
FATE_POLL_S = 0.05
LIFE_BEATS = 2
"""So many new heartbeats after a broken connection mean that the instance lives."""
DEATH_BEATS = 3
"""So many missing ones mean that it does not."""


@dataclass
class Instance:
    """`load` is in trajectories. Times are of this process's monotonic clock."""

    name: str
    tp: int
    status: InstanceStatus | None = None
    heartbeat_seen_s: float = 0.0
    load: int = 0
    failures_in_a_row: int = 0
    cool_until_s: float = 0.0
    died_at: tuple[int, int] | None = None
    died_s: float = 0.0

    @property
    def beat(self) -> tuple[int, int]:
        """(incarnation, heartbeat) of the registration."""
        return (-1, -1) if self.status is None else (self.status.incarnation, self.status.heartbeat)

    @property
    def is_dead(self) -> bool:
        """Did its last sign of life come before it was found dead?"""
        return self.died_at is not None and self.died_at == self.beat

    @property
    def state(self) -> str:
        return "not registered" if self.status is None else self.status.state

    @property
    def base_url(self) -> str:
        return "" if self.status is None else self.status.base_url


@dataclass
class InstancePool:
    """All instances of the plan. A registration counts only while its heartbeat counter moves.

    An instance that failed a request is left alone for a growing while: an endpoint that fails fast would otherwise
    always be the least loaded one and attract everything. One that died gets no request until it is back, proved, as its own
    replacement; `absence_s` is how long that may take. One that has not proved `served_version` is quarantined: its tokens would
    be older than those of all others.
    """

    run: RunDir
    placements: tuple[InstancePlacement, ...]
    heartbeat_timeout_s: float
    reload_keeps_requests: bool
    clock: Callable[[], float] = time.monotonic
    heartbeat_interval_s: float = 1.0
    absence_s: float = 0.0
    served_version: int = 0
    instances: dict[str, Instance] = field(init=False)
    _next_look_s: float = float("-inf")

    def __post_init__(self) -> None:
        self.instances = {placement.name: Instance(placement.name, placement.tp) for placement in self.placements}

    def look(self, *, force: bool = False) -> None:
        """Read the registrations again, at most every LOOK_PERIOD_S seconds."""
        now = self.clock()
        if now < self._next_look_s and not force:
            return
        self._next_look_s = now + LOOK_PERIOD_S
        for instance in self.instances.values():
            status = read_status(self.run, instance.name)
            if status is not None and (instance.status is None or status.heartbeat != instance.status.heartbeat):
                instance.heartbeat_seen_s = now
            instance.status = status

    def advance(self, served_version: int) -> None:
        """The trainer says that every instance which it counts on has proved this version."""
        if served_version > self.served_version:
            self.served_version = served_version
            self.look(force=True)  # what was read before shows the versions before

    def usable(self) -> list[Instance]:
        """Instances that may get a request now."""
        self.look()
        now = self.clock()
        return [instance for instance in self.instances.values() if self._is_usable(instance, now)]

    def is_interrupted(self, name: str) -> bool:
        """Is this instance away for a reason that is no fault of the request it failed?"""
        self.look(force=True)
        return self.instances[name].state in ("starting", "reloading", "stopping")

    async def has_died(self, instance: Instance) -> bool:
        """After a request failed there: was that the end of the instance? Waits a few heartbeats until that is clear."""
        asked = instance.beat[0]
        self.look(force=True)
        status, end_s = instance.status, self.clock() + DEATH_BEATS * self.heartbeat_interval_s
        while True:
            self.look()
            now = instance.status
            if status is None or now is None or now.incarnation != asked or now.state == "stopping":
                return True
            if now.heartbeat >= status.heartbeat + LIFE_BEATS:
                return False
            if self.clock() >= end_s:
                instance.died_at, instance.died_s = instance.beat, self.clock()
                return True
            await asyncio.sleep(FATE_POLL_S)

    def is_waiting_for_a_replacement(self) -> bool:
        """Can no instance answer, while one that died or just starts is on its way?"""
        return not self.usable() and any(self._is_coming(instance) for instance in self.instances.values())

    def claim(self, among: list[Instance], trajectories: int) -> Instance:
        """The least loaded of `among` for its size, with `trajectories` counted as in flight there until `release`."""
        instance = min(among, key=lambda candidate: (candidate.load / candidate.tp, candidate.name))
        instance.load += trajectories
        return instance

    def release(self, instance: Instance, trajectories: int) -> None:
        instance.load -= trajectories

    def failed(self, instance: Instance, *, interrupted: bool) -> None:
        """A request failed there: leave the instance alone for a while, longer each time unless it was interrupted.

        Requests that were in flight together fail together, which counts once.
        """
        now = self.clock()
        if now < instance.cool_until_s:
            return
        if not interrupted:
            instance.failures_in_a_row += 1
        pause_s = min(COOL_DOWN_S * 2 ** max(0, instance.failures_in_a_row - 1), LONGEST_COOL_DOWN_S)
        instance.cool_until_s = now + pause_s

    def succeeded(self, instance: Instance) -> None:
        instance.failures_in_a_row = 0

    def describe(self) -> str:
        """One phrase for error messages."""
        self.look(force=True)
        now = self.clock()
        return ", ".join(self._describe(instance, now) for instance in self.instances.values())

    def _is_usable(self, instance: Instance, now: float) -> bool:
        wanted = ("ready", "reloading") if self.reload_keeps_requests else ("ready",)
        silent_s = now - instance.heartbeat_seen_s
        is_there = instance.state in wanted and silent_s < self.heartbeat_timeout_s and not instance.is_dead
        # A replacement that is up but has not proved its weights yet would refuse everything.
        has_proved = instance.status is not None and instance.status.version >= self.served_version
        return is_there and has_proved and now >= instance.cool_until_s

    def _is_coming(self, instance: Instance) -> bool:
        now = self.clock()
        if instance.is_dead:
            return now - instance.died_s < self.absence_s
        if instance.status is None or now - instance.heartbeat_seen_s >= self.absence_s:
            return False
        return instance.status.version < 0 or instance.state in ("starting", "stopping")

    def _describe(self, instance: Instance, now: float) -> str:
        parts = ["dead" if instance.is_dead else instance.state]
        if instance.status is not None and now - instance.heartbeat_seen_s >= self.heartbeat_timeout_s:
            parts.append(f"no heartbeat for {now - instance.heartbeat_seen_s:.0f} s")
        if instance.status is not None and instance.status.version < self.served_version:
            parts.append(f"at version {instance.status.version} while the run is at {self.served_version}")
        if instance.failures_in_a_row:
            parts.append(f"{instance.failures_in_a_row} failures in a row")
        if instance.load:
            parts.append(f"{instance.load} trajectories in flight")
        return f"{instance.name} ({'; '.join(parts)})"
