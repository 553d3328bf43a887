"""How long the trainer waits for the instances' answers, and for which of them it need not wait at all.

An instance that nobody replaces has one deadline, and its heartbeat must move. One that the supervisor starts again gets, each time
it is seen to be away or back, the time that a start may take; how often that happens is the supervisor's to limit, and it ends
the run when the instance's budget is used up. While it is away a refresh that has enough others goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from conf.schema import LibraConfig
from stages.desired import LONGEST_BACKOFF_S, replaceable
from stages.members import given_up
from stages.rundir import RunDir
from stages.weights.errors import InstanceLateError, InstanceSilentError, WeightsError
from stages.weights.instances import InstanceStatus, read_statuses

AWAY_BEATS = 3
"""An instance whose counter stood still for so many intervals is taken to be away."""
START_S = 60.0
"""From the start of a replacement to its registration: a step's start and Python's imports on a busy node."""


def load_s(config: LibraConfig) -> float:
    """From the registration of a new instance to its ACK."""
    return config.rollout.ready_timeout_s + config.rollout.stop_timeout_s + config.weights.refresh_timeout_s


def absence_s(config: LibraConfig) -> float:
    """From an instance's last heartbeat to the registration of its replacement."""
    return config.rollout.heartbeat_timeout_s + LONGEST_BACKOFF_S + START_S


def replacements_s(config: LibraConfig) -> float:
    """By how much replacements of one instance can delay what waits for it, at most."""
    return config.rollout.max_replacements * (absence_s(config) + load_s(config))


@dataclass
class _Seen:
    """`due_s`: when the instance must have answered, on this process's clock."""

    due_s: float
    incarnation: int = -1
    heartbeat: int = -1
    beat_s: float = 0.0
    state: str = "not registered"


@dataclass
class Patience:
    """Judges instances by whether their counters move on this process's own clock; clocks of hosts are not compared.

    `away` says, by name, why an instance need not be waited for while others are enough; it may still answer. `failures`
    holds those that will not answer in time. An instance that has not registered has only its deadline.
    """

    run: RunDir
    config: LibraConfig
    instances: Sequence[str]
    deadline_s: float
    clock: Callable[[], float] = time.monotonic
    statuses: Mapping[str, InstanceStatus] | None = None
    away: dict[str, str] = field(default_factory=dict)
    failures: dict[str, WeightsError] = field(default_factory=dict)
    given_up: Mapping[str, str] = field(default_factory=dict)
    _started_s: float = field(init=False)
    _seen: dict[str, _Seen] = field(init=False)
    _replaceable: frozenset[str] = frozenset()
    _next_look_s: float = float("-inf")

    def __post_init__(self) -> None:
        self._started_s = self.clock()
        self._seen = {name: _Seen(self._started_s + self.deadline_s) for name in self.instances}
        self._replaceable = replaceable(self.run)

    def is_replaced_after(self, instance: str) -> bool:
        """Does the supervisor start this instance again when it fails?"""
        return instance in self._replaceable

    def asked_again(self, instance: str) -> None:
        """It has been given the same order once more, and gets the time for it."""
        seen = self._seen[instance]
        seen.due_s = max(seen.due_s, self.clock() + self.deadline_s)

    def check(self, missing: Sequence[str]) -> None:
        """Look at the instances that have not answered, often enough, and judge them."""
        now_s = self.clock()
        late = [name for name in missing if now_s >= self._seen[name].due_s and name not in self.failures]
        if late or now_s >= self._next_look_s:
            self._next_look_s = now_s + self.config.rollout.heartbeat_timeout_s / 10
            self._look(missing, now_s)
        for name in missing:
            if now_s >= self._seen[name].due_s and name not in self.given_up:
                self.failures.setdefault(name, InstanceLateError(name, now_s - self._started_s))

    def _look(self, missing: Sequence[str], now_s: float) -> None:
        self.given_up = given_up(self.run)
        statuses, self.statuses = self.statuses, None  # those of the beginning are new once
        if statuses is None:
            statuses = read_statuses(self.run, missing)
        for name in missing:
            if name in statuses:
                self._look_at(statuses[name], self._seen[name], now_s)

    def _look_at(self, status: InstanceStatus, seen: _Seen, now_s: float) -> None:
        name = status.instance
        if 0 <= seen.incarnation < status.incarnation:
            seen.due_s = max(seen.due_s, now_s + load_s(self.config))
        if (status.incarnation, status.heartbeat) != (seen.incarnation, seen.heartbeat):
            seen.incarnation, seen.heartbeat = status.incarnation, status.heartbeat
            seen.beat_s, seen.state = now_s, status.state
            self._note_absence(status)
            return
        silent_s = now_s - seen.beat_s
        if not self.is_replaced_after(name):
            if silent_s >= self.config.rollout.heartbeat_timeout_s:
                self.failures.setdefault(name, InstanceSilentError(name, silent_s, seen.state))
            return
        if silent_s >= AWAY_BEATS * self.config.rollout.heartbeat_interval_s:
            seen.due_s = max(seen.due_s, seen.beat_s + absence_s(self.config))
        if silent_s >= self.config.rollout.heartbeat_timeout_s:
            self.away.setdefault(name, str(InstanceSilentError(name, silent_s, seen.state)))

    def _note_absence(self, status: InstanceStatus) -> None:
        if not self.is_replaced_after(status.instance):
            return
        if status.state == "stopping":
            self.away.setdefault(status.instance, f"instance {status.instance} is ending, to be started again")
        elif status.incarnation > 0 and status.version < 0:
            start = f"start {status.incarnation} of instance {status.instance} has proved no version yet"
            self.away.setdefault(status.instance, start)
