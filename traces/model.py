"""What a trace file holds once read. All times are nanoseconds, int."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Details = dict[str, Any]


@dataclass(slots=True)
class SpanRecord:
    """One phase of one process. `span_id` is unique within `session`; None in the reference system's records."""

    phase: str
    start_ns: int
    end_ns: int
    step: int | None
    version: int | None
    thread: str
    session: str
    span_id: int | None
    parent_id: int | None
    details: Details
    unfinished: bool = False


@dataclass(slots=True)
class PointRecord:
    """A counter, an instant or a flow event: something without duration.

    `kind` is "counter", "instant", or a flow's "start" | "step" | "end". Counters have a `value`, flows a `flow_id`.
    """

    kind: str
    name: str
    ts_ns: int
    step: int | None
    version: int | None
    thread: str
    session: str
    span_id: int | None
    details: Details
    value: float | None = None
    flow_id: str = ""


@dataclass(slots=True)
class Anchor:
    """One simultaneous reading of both clocks."""

    wall_ns: int
    monotonic_ns: int


@dataclass(slots=True)
class Session:
    """One life of a process: a restarted process appends a new session to the same file.

    Args:
        session: random id; empty for the reference system's files, which have no anchors.
        offset_ns: what the recorder added to its monotonic clock to get the times that it wrote.
        boot_id: same boot id = same monotonic clock. Empty when unknown.
        first_ns, last_ns: smallest and largest time recorded (start or end), in recorded time.
        closed: the recorder was closed in order.
    """

    session: str
    offset_ns: int = 0
    hostname: str = ""
    boot_id: str = ""
    pid: int = 0
    num_slots: float = 1
    anchors: list[Anchor] = field(default_factory=list)
    first_ns: int = 0
    last_ns: int = 0
    dropped: int = 0
    closed: bool = False

    def saw(self, ts_ns: int) -> None:
        """Extend the time range by one moment."""
        self.first_ns = min(self.first_ns or ts_ns, ts_ns)
        self.last_ns = max(self.last_ns, ts_ns)


@dataclass(slots=True)
class ProcessTrace:
    """Everything in one trace file. `attempt` is the run's attempt that it was found under, 0 outside a run."""

    path: Path
    attempt: int
    role: str = "trainer"
    name: str = "trainer"
    rank: int = 0
    world_size: int = 1
    sessions: dict[str, Session] = field(default_factory=dict)
    spans: list[SpanRecord] = field(default_factory=list)
    points: list[PointRecord] = field(default_factory=list)
    num_bad_lines: int = 0

    @property
    def key(self) -> tuple[int, str, str, int]:
        """Identifies the process within the run."""
        return (self.attempt, self.role, self.name, self.rank)

    @property
    def holder_key(self) -> tuple[int, str, str, int]:
        """The key of the process that holds the slots: "rollout_000.server" works on those of "rollout_000"."""
        return (self.attempt, self.role, self.name.partition(".")[0], self.rank)

    @property
    def label(self) -> str:
        """The process's name for people."""
        return f"{self.name} rank {self.rank}" if self.world_size > 1 else self.name

    @property
    def num_slots(self) -> float:
        """GPUs (worker slots) that the process holds."""
        return max((session.num_slots for session in self.sessions.values()), default=1)
