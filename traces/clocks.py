"""Puts the clocks of all processes on one time line.

Processes of one host (one boot of one kernel) share the monotonic clock, so among themselves they are exact. A host's
monotonic clock becomes wall time through the median of (wall - monotonic) over all anchors of that host: one clock step
in a run does not move it. Between hosts the wall clocks are believed unless a message shows that they are wrong: a flow
can not end before it started. Where it seems to, messages in the two directions bound the error and its middle is taken
(Cristian, "Probabilistic clock synchronization", 1989, with the messages that the run sends anyway).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from traces.model import ProcessTrace, Session


@dataclass(frozen=True)
class HostClock:
    """One host's place on the time line.

    Args:
        wall_offset_ns: wall time = monotonic + this, by the host's own anchors.
        wall_step_ns: spread of that over the run; large = the wall clock was stepped.
        shift_ns: added on top, because messages contradicted the wall clock; 0 = the wall clock was believed.
        uncertainty_ns: half the width of the interval that messages leave for the shift; None = not shifted, or
            bounded on one side only.
    """

    wall_offset_ns: int
    wall_step_ns: int
    shift_ns: int = 0
    uncertainty_ns: int | None = None


@dataclass(frozen=True)
class FlowPoint:
    """A flow event as far as clocks care: `key` = (attempt, kind, id); `kind` = "start" | "step" | "end"."""

    key: tuple[int, str, str]
    kind: str
    ts_ns: int
    clock: str


Shift = tuple[int, int | None]


class Clocks:
    """Turns recorded times into times of the common line. `hosts` is keyed by host name and boot id."""

    def __init__(self, processes: list[ProcessTrace]) -> None:
        """Reads the anchors and flow points of all processes, whose times are still as recorded."""
        sessions: dict[str, list[Session]] = defaultdict(list)
        for process in processes:
            for session in process.sessions.values():
                sessions[_clock_key(process, session)].append(session)
        self.hosts = {key: _host_clock(members) for key, members in sessions.items()}
        shifts = causal_shifts(sorted(self.hosts), self._flow_points(processes))
        for key, (shift_ns, uncertainty_ns) in shifts.items():
            self.hosts[key] = replace(self.hosts[key], shift_ns=shift_ns, uncertainty_ns=uncertainty_ns)

    def apply(self, process: ProcessTrace) -> None:
        """Move every time in `process` from recorded time to the common line."""
        correction = {name: self._correction_ns(process, session) for name, session in process.sessions.items()}
        for span in process.spans:
            span.start_ns += correction[span.session]
            span.end_ns += correction[span.session]
        for point in process.points:
            point.ts_ns += correction[point.session]
        for name, session in process.sessions.items():
            session.first_ns += correction[name]
            session.last_ns += correction[name]

    def _correction_ns(self, process: ProcessTrace, session: Session) -> int:
        clock = self.hosts.get(_clock_key(process, session))
        if clock is None:  # the process began after the clocks were read: the run is alive
            return 0
        return clock.shift_ns + (clock.wall_offset_ns - session.offset_ns if session.anchors else 0)

    def _flow_points(self, processes: list[ProcessTrace]) -> list[FlowPoint]:
        found = []
        for process in processes:
            correction = {name: self._correction_ns(process, session) for name, session in process.sessions.items()}
            clock = {name: _clock_key(process, session) for name, session in process.sessions.items()}
            for point in process.points:
                if point.flow_id:
                    key = (process.attempt, point.name, point.flow_id)
                    ts_ns = point.ts_ns + correction[point.session]
                    found.append(FlowPoint(key, point.kind, ts_ns, clock[point.session]))
        return found


def causal_shifts(clocks: list[str], points: Iterable[FlowPoint]) -> dict[str, Shift]:
    """Shift (ns) and its uncertainty (ns) of the clocks whose times contradict a flow; the others are left out.

    Clocks are joined one by one to those already placed, the best bounded first; the first by name stays where it is.
    """
    lower = _lower_bounds(points)
    placed: dict[str, Shift] = {}
    waiting = sorted(clocks)
    while waiting:
        intervals = {clock: _interval(lower, placed, clock) for clock in waiting}
        best = min(waiting, key=lambda clock: _looseness(*intervals[clock]))
        placed[best] = _choose(*intervals[best])
        waiting.remove(best)
    return {clock: shift for clock, shift in placed.items() if shift[0]}


def _lower_bounds(points: Iterable[FlowPoint]) -> dict[tuple[str, str], int]:
    """For (a, b): the most (ns) by which b seems to have received before a sent; b moves at least that much more."""
    by_key: dict[tuple[int, str, str], list[FlowPoint]] = defaultdict(list)
    for point in points:
        by_key[point.key].append(point)
    lower: dict[tuple[str, str], int] = {}
    for members in by_key.values():
        starts = [point for point in members if point.kind == "start"]
        if len(starts) != 1:  # sent twice (a retry): which sending arrived is unknown
            continue
        sent = starts[0]
        for received in members:
            if received.kind != "start" and received.clock != sent.clock:
                pair = (sent.clock, received.clock)
                early_ns = sent.ts_ns - received.ts_ns
                lower[pair] = max(lower.get(pair, early_ns), early_ns)
    return lower


def _interval(lower: dict[tuple[str, str], int], placed: dict[str, Shift], clock: str) -> tuple[float, float]:
    """The shifts (ns) of `clock` that the flows to and from all placed clocks allow."""
    low, high = -math.inf, math.inf
    for other, (shift_ns, _) in placed.items():
        if (other, clock) in lower:
            low = max(low, shift_ns + lower[other, clock])
        if (clock, other) in lower:
            high = min(high, shift_ns - lower[clock, other])
    return low, high


def _looseness(low: float, high: float) -> tuple[float, int]:
    return high - low, math.isinf(low) + math.isinf(high)


def _choose(low: float, high: float) -> Shift:
    if low <= 0 <= high:
        return 0, None
    if math.isinf(low):
        return int(high), None
    if math.isinf(high):
        return int(low), None
    return int(low + high) // 2, int(abs(high - low)) // 2


def _clock_key(process: ProcessTrace, session: Session) -> str:
    """Sessions of one key share a monotonic clock; without a boot id every session is on its own."""
    if session.boot_id:
        return f"{session.hostname} {session.boot_id}"
    return f"{session.hostname or process.path.name} {session.session}"


def _host_clock(sessions: list[Session]) -> HostClock:
    offsets = [anchor.wall_ns - anchor.monotonic_ns for session in sessions for anchor in session.anchors]
    if not offsets:
        return HostClock(0, 0)
    return HostClock(int(median(offsets)), max(offsets) - min(offsets))
