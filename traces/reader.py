"""Reads trace files: ours and the reference system's, whole or torn, of finished, killed and running processes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from traces.model import Anchor, PointRecord, ProcessTrace, Session, SpanRecord
from traces.recorder import SCHEMA

FILE_PATTERN = "phase_trace_rank*.jsonl"
_FILE_NAME = re.compile(r"^phase_trace_rank(\d+)(?:\.(.+))?\.jsonl$")
_ATTEMPT = re.compile(r"^\d+$")

Record = dict[str, Any]


class NoTracesError(ValueError):
    """There is no trace file where the user pointed."""


def find_files(where: str | Path) -> list[Path]:
    """Trace files of a run directory, of any folder, or matching a pattern; sorted.

    Raises NoTracesError, with what was looked for, when there are none.
    """
    if has_magic(str(where)):
        found = {Path(path) for path in glob(str(where), recursive=True) if Path(path).is_file()}
    elif Path(where).is_file():
        found = {Path(where)}
    else:
        root = Path(where)
        found = {*root.glob(f"attempts/*/traces/{FILE_PATTERN}"), *root.glob(FILE_PATTERN)}
        found = found or set(root.rglob(FILE_PATTERN))
    if not found:
        wanted = f"attempts/*/traces/{FILE_PATTERN} or {FILE_PATTERN}"
        state = "no such folder" if not has_magic(str(where)) and not Path(where).exists() else f"looked for {wanted}"
        raise NoTracesError(
            f"no traces in {where}: {state} "
            "(is phase_trace_enabled on, does trace.directory point elsewhere, did the run start?)"
        )
    return sorted(found)


def load_file(path: Path) -> ProcessTrace:
    """One file as a ProcessTrace, in recorded time. Lines that are no record are skipped and counted."""
    loader = _Loader(path)
    for record in _records(path, loader.process):
        loader.take(record)
    return loader.finish()


def _records(path: Path, process: ProcessTrace) -> Iterator[Record]:
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:  # half a line, or two halves glued together
                record = None
            if isinstance(record, dict) and record.get("schema") == SCHEMA:
                yield record
            else:
                process.num_bad_lines += 1


class _Loader:
    """Builds a ProcessTrace from its records, in file order."""

    def __init__(self, path: Path) -> None:
        self.process = ProcessTrace(path, _attempt_of(path))
        match = _FILE_NAME.match(path.name)
        if match:
            self.process.rank = int(match.group(1))
            self.process.name = match.group(2) or "trainer"
        self._open: dict[tuple[str, int | str], SpanRecord] = {}
        self._handlers: dict[str, Callable[[Record, Session], None]] = {
            "anchor": self._anchor,
            "phase_start": self._phase_start,
            "phase_span": self._phase_end,
            "phase_unfinished": self._phase_end,
            "counter": self._point,
            "flow": self._point,
            "instant": self._point,
        }

    def take(self, record: Record) -> None:
        """Add one record; a record that lacks what its event needs counts as a bad line."""
        handler = self._handlers.get(str(record.get("event")))
        if handler is None:  # an event of a later schema revision
            return
        try:
            session = self._session(record)
            handler(record, session)
        except (KeyError, TypeError, ValueError, OverflowError):
            self.process.num_bad_lines += 1

    def finish(self) -> ProcessTrace:
        """Close spans that have no end at the last time their session recorded, and order spans by start."""
        for (session_id, _), span in self._open.items():
            span.end_ns = max(span.start_ns, self.process.sessions[session_id].last_ns)
            self.process.spans.append(span)
        self.process.spans.sort(key=lambda span: (span.start_ns, -span.end_ns, span.span_id or 0))
        return self.process

    def _session(self, record: Record) -> Session:
        process = self.process
        session_id = str(record.get("session", ""))
        if session_id not in process.sessions:
            process.rank, process.world_size = int(record["rank"]), int(record["world_size"])
            process.sessions[session_id] = Session(session_id)
            process.role = str(record.get("role", process.role))
            process.name = str(record.get("name", process.name))
        return process.sessions[session_id]

    def _anchor(self, record: Record, session: Session) -> None:
        session.anchors.append(Anchor(int(record["wall_ns"]), int(record["monotonic_ns"])))
        session.offset_ns = int(record["offset_ns"])
        session.hostname = str(record["hostname"])
        session.boot_id = str(record["boot_id"])
        session.pid = int(record["pid"])
        session.num_slots = float(record["num_slots"])
        session.dropped = int(record["dropped"])
        session.closed = record["reason"] == "close"
        session.saw(session.offset_ns + int(record["monotonic_ns"]))

    def _phase_start(self, record: Record, session: Session) -> None:
        span = _span(record, int(record["ts_ns"]), int(record["ts_ns"]))
        span.unfinished = True
        key = _open_key(span)
        # Reference records: "step" is started and never ended; the next start of the phase is its end.
        previous = self._open.pop(key, None)
        if previous is not None:
            previous.end_ns = span.start_ns
            previous.unfinished = False
            self.process.spans.append(previous)
        self._open[key] = span
        session.saw(span.start_ns)

    def _phase_end(self, record: Record, session: Session) -> None:
        span = _span(record, int(record["start_ns"]), int(record["end_ns"]))
        span.unfinished = record["event"] == "phase_unfinished"
        self._open.pop(_open_key(span), None)
        self.process.spans.append(span)
        session.saw(span.start_ns)
        session.saw(span.end_ns)

    def _point(self, record: Record, session: Session) -> None:
        event = str(record["event"])
        value = record.get("value")
        point = PointRecord(
            kind=str(record["flow"]) if event == "flow" else event,
            name=str(record["phase"]),
            ts_ns=int(record["ts_ns"]),
            step=_optional_int(record.get("step")),
            version=_optional_int(record.get("version")),
            thread=str(record.get("thread", "")),
            session=session.session,
            span_id=_optional_int(record.get("span_id")),
            details=_details(record),
            value=float(value) if value is not None and math.isfinite(value) else None,
            flow_id=str(record.get("flow_id", "")),
        )
        self.process.points.append(point)
        session.saw(point.ts_ns)


def _span(record: Record, start_ns: int, end_ns: int) -> SpanRecord:
    return SpanRecord(
        phase=str(record["phase"]),
        start_ns=start_ns,
        end_ns=max(start_ns, end_ns),
        step=_optional_int(record.get("step")),
        version=_optional_int(record.get("version")),
        thread=str(record.get("thread", "MainThread")),
        session=str(record.get("session", "")),
        span_id=_optional_int(record.get("span_id")),
        parent_id=_optional_int(record.get("parent_id")),
        details=_details(record),
    )


def _open_key(span: SpanRecord) -> tuple[str, int | str]:
    return (span.session, span.phase if span.span_id is None else span.span_id)


def _details(record: Record) -> dict[str, Any]:
    details = record.get("details")
    return details if isinstance(details, dict) else {}


def _optional_int(value: object) -> int | None:
    return None if value is None else int(value)  # type: ignore[call-overload]


def _attempt_of(path: Path) -> int:
    """The N of `attempts/N/traces/FILE`, else 0."""
    folder = path.absolute().parent.parent
    is_attempt = path.absolute().parent.name == "traces" and folder.parent.name == "attempts"
    return int(folder.name) if is_attempt and _ATTEMPT.match(folder.name) else 0
