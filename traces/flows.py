"""Turns flow events into the arrows of the trace-event format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from traces.encoding import quote
from traces.model import PointRecord


@dataclass(frozen=True)
class _Point:
    kind: str
    ts_ns: int
    place: str
    pid: int


class Arrows:
    """Collects flow events and writes one arrow (chain of s, t, f events with its own id) per thing that moved.

    A flow that arrives once is one chain through all its steps. A flow that arrives several times (a version that every
    instance loads) is one chain per arriving process. A second start of the same id (a retry) begins anew.
    """

    def __init__(self) -> None:
        self._flows: dict[tuple[int, str, str], list[_Point]] = defaultdict(list)
        self.num_without_arrow = 0

    def add(self, attempt: int, point: PointRecord, place: str, pid: int) -> None:
        """`place` is the JSON text of pid, tid and ts."""
        self._flows[attempt, point.name, point.flow_id].append(_Point(point.kind, point.ts_ns, place, pid))

    def events(self) -> Iterator[str]:
        """The JSON texts of all flow events. Flows that lack a start or anything after it are only counted."""
        arrow_id = 0
        for (_, kind, _), points in self._flows.items():
            chains = [chain for sending in _sendings(points) for chain in _chains(sending)]
            self.num_without_arrow += not chains
            for chain in chains:
                arrow_id += 1
                for index, point in enumerate(chain):
                    letter = "s" if index == 0 else "f" if index == len(chain) - 1 else "t"
                    ending = ',"bp":"e"' if letter == "f" else ""
                    yield (
                        f'{{"ph":"{letter}","id":{arrow_id},"name":{quote(kind)},"cat":"libra.flow",{point.place}{ending}}}'
                    )


def _sendings(points: list[_Point]) -> list[list[_Point]]:
    """Splits the events of one id into runs that begin with a start; what precedes the first start is left out."""
    runs: list[list[_Point]] = []
    for point in sorted(points, key=lambda point: (point.ts_ns, point.kind != "start")):
        if point.kind == "start":
            runs.append([point])
        elif runs:
            runs[-1].append(point)
    return runs


def _chains(sending: list[_Point]) -> list[list[_Point]]:
    start, *rest = sending
    if not rest:
        return []
    if sum(point.kind == "end" for point in rest) <= 1:
        return [sending]
    by_process: dict[int, list[_Point]] = defaultdict(list)
    for point in rest:
        by_process[point.pid].append(point)
    return [[start, *members] for members in by_process.values()]
