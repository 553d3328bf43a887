"""A run's traces as one thing: files found, clocks aligned, processes read one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from traces.clocks import Clocks
from traces.model import ProcessTrace
from traces.reader import find_files, load_file

_ROLE_ORDER = ("controller", "trainer", "rollout")


class RunTrace:
    """All trace files of a run. `heads` are its processes without their spans, in display order.

    Raises NoTracesError when there are none.
    """

    def __init__(self, where: str | Path) -> None:
        self.where = Path(where)
        self.heads = sorted((_head(path) for path in find_files(where)), key=_display_order)
        self.clocks = Clocks(self.heads)
        for head in self.heads:
            self.clocks.apply(head)
        firsts = [session.first_ns for head in self.heads for session in head.sessions.values()]
        self.start_ns = min(firsts, default=0)
        self.end_ns = {head.attempt: self._end_of(head.attempt) for head in self.heads}

    @property
    def attempts(self) -> list[int]:
        """Attempts that left traces, ascending."""
        return sorted(self.end_ns)

    def short(self, path: Path) -> str:
        """`path` as seen from the run, so that a shared trace does not tell where the run lay."""
        return str(path.relative_to(self.where)) if path.is_relative_to(self.where) else path.name

    def processes(self) -> Iterator[ProcessTrace]:
        """Each process with its spans and points, on the common time line, in the order of `heads`."""
        for head in self.heads:
            process = load_file(head.path)
            self.clocks.apply(process)
            self._extend_unfinished(process)
            yield process

    def _end_of(self, attempt: int) -> int:
        mine = [head for head in self.heads if head.attempt == attempt]
        return max((session.last_ns for head in mine for session in head.sessions.values()), default=0)

    def _extend_unfinished(self, process: ProcessTrace) -> None:
        """A killed process shows its last phases until it was started again, or until its attempt ended.

        A process that hangs writes nothing, so ending its phase at its last record would hide the hang.
        """
        sessions = sorted(process.sessions.values(), key=lambda session: session.first_ns)
        restarts = [session.first_ns for session in sessions[1:]]
        ends = [*restarts, self.end_ns[process.attempt]]
        horizon = {session.session: end for session, end in zip(sessions, ends, strict=False) if not session.closed}
        for span in process.spans:
            if span.unfinished and span.session in horizon:
                span.end_ns = max(span.end_ns, horizon[span.session])
                silent_ns = span.end_ns - process.sessions[span.session].last_ns
                span.details = {**span.details, "silent_s": silent_ns / 1e9}
        process.spans.sort(key=lambda span: (span.start_ns, -span.end_ns, span.span_id or 0))


def _head(path: Path) -> ProcessTrace:
    process = load_file(path)
    process.spans = []
    process.points = [point for point in process.points if point.flow_id]
    return process


def _display_order(process: ProcessTrace) -> tuple[int, int, str, int, str]:
    role = process.role
    order = _ROLE_ORDER.index(role) if role in _ROLE_ORDER else len(_ROLE_ORDER)
    return (process.attempt, order, process.name, process.rank, str(process.path))
