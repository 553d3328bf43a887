"""Gives every span a track on which it nests properly, so that a viewer draws it under its true parent or alone."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from traces.model import PointRecord, ProcessTrace, SpanRecord

FLOW_SLICE_NS = 1_000


class Lanes:
    """The lanes of one thread. Feed spans ordered by (start, -end).

    A span goes under its parent when the parent is the innermost span of its lane and contains it, else on the lowest
    lane that is idle at its start, else on a new one: asyncio tasks that overlap come apart, sequential ones share a
    lane. Spans without ids (the reference system's) nest by time alone.
    """

    def __init__(self) -> None:
        self._stacks: list[list[SpanRecord]] = []
        self._idle: list[int] = []
        self._busy: list[tuple[int, int]] = []  # (end of the lane's outermost span, lane)
        self._lane_of: dict[tuple[str, int], int] = {}

    def __len__(self) -> int:
        return len(self._stacks)

    def place(self, span: SpanRecord) -> int:
        """The lane of `span`, 0 or more."""
        while self._busy and self._busy[0][0] <= span.start_ns:
            heapq.heappush(self._idle, heapq.heappop(self._busy)[1])
        lane = self._under_parent(span)
        if lane is None:
            lane = self._idle_lane()
            heapq.heappush(self._busy, (span.end_ns, lane))
            self._stacks[lane] = []
        self._stacks[lane].append(span)
        if span.span_id is not None:
            self._lane_of[span.session, span.span_id] = lane
        return lane

    def _under_parent(self, span: SpanRecord) -> int | None:
        if span.span_id is None:
            candidates: Iterable[int] = sorted(lane for _, lane in self._busy)
        elif span.parent_id is not None and (span.session, span.parent_id) in self._lane_of:
            candidates = [self._lane_of[span.session, span.parent_id]]
        else:
            return None
        return next((lane for lane in candidates if self._fits(lane, span)), None)

    def _fits(self, lane: int, span: SpanRecord) -> bool:
        stack = self._stacks[lane]
        while stack and stack[-1].end_ns <= span.start_ns:
            stack.pop()
        if not stack:
            return False
        top = stack[-1]
        is_parent = top.span_id == span.parent_id and top.session == span.session
        return is_parent and span.end_ns <= top.end_ns

    def _idle_lane(self) -> int:
        if self._idle:
            return heapq.heappop(self._idle)
        self._stacks.append([])
        return len(self._stacks) - 1


class Layout:
    """The tracks of one process: every span and every point gets a tid.

    `spans` are the process's spans and a short one for each flow event recorded outside every span (an arrow needs a
    slice to hold on to); `track_names` maps tid to name, in display order: the main thread first, lanes side by side.
    """

    def __init__(self, process: ProcessTrace, first_tid: int) -> None:
        slices = {id(point): _slice(point) for point in process.points if point.flow_id and point.span_id is None}
        self.spans = sorted([*process.spans, *slices.values()], key=lambda span: (span.start_ns, -span.end_ns))
        threads: dict[str, Lanes] = {}
        placed = [(span.thread, threads.setdefault(span.thread, Lanes()).place(span)) for span in self.spans]
        tracks = {*placed, *((point.thread, 0) for point in process.points if point.kind != "counter")}
        ordered = sorted(tracks, key=lambda track: (track[0] != "MainThread", track))
        self._tids = {track: first_tid + index for index, track in enumerate(ordered)}
        self.track_names = {tid: _track_name(*track) for track, tid in self._tids.items()}
        self._tid_of = {id(span): self._tids[track] for span, track in zip(self.spans, placed, strict=True)}
        self._span_of = {(span.session, span.span_id): span for span in process.spans if span.span_id is not None}
        self._slices = slices

    def tid_of_span(self, span: SpanRecord) -> int:
        """The track of one of `spans`."""
        return self._tid_of[id(span)]

    def tid_of_point(self, point: PointRecord) -> int:
        """The track of the span around the point, else the first of its thread; 0 for counters."""
        span = self._slices.get(id(point)) or self._span_of.get((point.session, point.span_id or 0))
        return self._tids.get((point.thread, 0), 0) if span is None else self._tid_of[id(span)]


def _track_name(thread: str, lane: int) -> str:
    return thread if lane == 0 else f"{thread} · {lane + 1}"


def _slice(point: PointRecord) -> SpanRecord:
    return SpanRecord(
        phase=f"{point.name} {point.flow_id}",
        start_ns=point.ts_ns,
        end_ns=point.ts_ns + FLOW_SLICE_NS,
        step=point.step,
        version=point.version,
        thread=point.thread,
        session=point.session,
        span_id=None,
        parent_id=None,
        details={"flow": point.kind},
    )
