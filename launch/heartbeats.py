"""Instances that run but do not live: their heartbeat counter stands still, because the agent hangs or was stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from launch.tracking import Tracked
from stages.rundir import RunDir
from stages.weights.instances import read_status

LOOKS = 10
"""Registrations are read this often within the timeout."""


class Silence:
    """Judges by this process's own clock. An instance that has not registered is not judged: starting has its own deadline."""

    def __init__(self, run: RunDir, timeout_s: float, clock: Callable[[], float]) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._clock = clock
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}
        self._next_look_s = float("-inf")

    def find(self, tracked: Iterable[Tracked]) -> list[tuple[Tracked, float]]:
        """The running instances whose counter stands still too long, with the seconds."""
        now_s = self._clock()
        if now_s < self._next_look_s:
            return []
        late_s = now_s - self._next_look_s
        if late_s > self._timeout_s / LOOKS:
            # This process was held up itself, by the same filesystem perhaps: the time in which it did not look is nobody's silence.
            self._seen = {name: (beat, since_s + late_s) for name, (beat, since_s) in self._seen.items()}
        self._next_look_s = now_s + self._timeout_s / LOOKS
        instances = [item for item in tracked if item.spec.is_service and item.is_alive and item.asked_s is None]
        silent = ((item, self._still_s(item, now_s)) for item in instances)
        return [(item, still_s) for item, still_s in silent if still_s >= self._timeout_s]

    def _still_s(self, item: Tracked, now_s: float) -> float:
        status = read_status(self._run, item.spec.name)
        if status is None or status.incarnation != item.step.incarnation.number:
            return 0.0
        beat = (status.incarnation, status.heartbeat)
        seen, since_s = self._seen.get(item.spec.name, (None, now_s))
        if seen != beat:
            self._seen[item.spec.name] = (beat, now_s)
            return 0.0
        return now_s - since_s

    def any_served(self, names: Iterable[str]) -> bool:
        """Has one of these instances proved a version of the weights in this attempt?"""
        statuses = (read_status(self._run, name) for name in names)
        return any(status is not None and status.version >= 0 for status in statuses)
