"""Writes a run's traces in the Chrome trace-event format, which Perfetto and chrome://tracing read.

Format: "Trace Event Format", object form {traceEvents, otherData}. One process of the file per process of the run, one
track ("thread") per lane, times in microseconds since the run's first record. Events are written as they are made; only
one process's spans are in memory at a time.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from traces.encoding import encode_details, encode_number, quote
from traces.flows import Arrows
from traces.lanes import Layout
from traces.model import PointRecord, ProcessTrace, SpanRecord
from traces.recorder import SCHEMA
from traces.run import RunTrace


@dataclass(frozen=True)
class Exported:
    """What was written. `bad_lines` maps a file to the lines skipped in it."""

    path: Path
    num_events: int
    num_processes: int
    num_unfinished: int
    num_dropped: int
    bad_lines: dict[str, int]
    duration_s: float


def export(run: RunTrace, out: Path) -> Exported:
    """Write `out`, compressed when its name ends in .gz. It appears whole or not at all.

    Raises OSError when it can not be written.
    """
    with _replacing(out) as file:
        writer = _Writer(file, run)
        return writer.write_all(out)


class _Writer:
    def __init__(self, file: IO[str], run: RunTrace) -> None:
        self._file = file
        self._run = run
        self._arrows = Arrows()
        self._num_events = 0
        self._num_unfinished = 0
        self._bad_lines: dict[str, int] = {}
        # Viewers take the thread whose tid equals the pid for the main thread: keep the two ranges apart.
        self._next_tid = len(run.heads) + 1

    def write_all(self, out: Path) -> Exported:
        num_dropped = 0
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for pid, process in enumerate(self._run.processes(), start=1):
            self._process(pid, process)
            num_dropped += sum(session.dropped for session in process.sessions.values())
            if process.num_bad_lines:
                self._bad_lines[self._run.short(process.path)] = process.num_bad_lines
        for event in self._arrows.events():
            self._emit(event)
        other = self._other_data(num_dropped)
        self._file.write(f'\n],"otherData":{encode_details(other)}}}\n')
        duration_s = (max(self._run.end_ns.values()) - self._run.start_ns) / 1e9
        num_processes = len(self._run.heads)
        return Exported(
            out, self._num_events, num_processes, self._num_unfinished, num_dropped, self._bad_lines, duration_s
        )

    def _process(self, pid: int, process: ProcessTrace) -> None:
        layout = Layout(process, self._next_tid)
        self._next_tid += len(layout.track_names)
        self._name_process(pid, process)
        for tid, name in layout.track_names.items():
            self._name_thread(pid, tid, name)
        for span in layout.spans:
            self._span(pid, layout.tid_of_span(span), span)
        for point in process.points:
            self._point(pid, layout.tid_of_point(point), process.attempt, point)

    def _name_process(self, pid: int, process: ProcessTrace) -> None:
        attempt = f"attempt {process.attempt} · " if len(self._run.attempts) > 1 else ""
        hosts = sorted({session.hostname for session in process.sessions.values() if session.hostname})
        self._metadata(pid, 0, "process_name", f'"name":{quote(attempt + process.label)}')
        self._metadata(pid, 0, "process_sort_index", f'"sort_index":{pid}')
        if hosts:
            self._metadata(pid, 0, "process_labels", f'"labels":{quote(", ".join(hosts))}')

    def _name_thread(self, pid: int, tid: int, name: str) -> None:
        self._metadata(pid, tid, "thread_name", f'"name":{quote(name)}')
        self._metadata(pid, tid, "thread_sort_index", f'"sort_index":{tid}')

    def _metadata(self, pid: int, tid: int, name: str, args: str) -> None:
        self._emit(f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{name}","args":{{{args}}}}}')

    def _span(self, pid: int, tid: int, span: SpanRecord) -> None:
        args = _args(span)
        if span.unfinished:
            args["unfinished"] = True
            self._num_unfinished += 1
        self._emit(
            f'{{"ph":"X","pid":{pid},"tid":{tid},"name":{quote(span.phase)},"cat":"libra.phase"'
            f',"ts":{self._us(span.start_ns)},"dur":{_us(span.end_ns - span.start_ns)},"args":{encode_details(args)}}}'
        )

    def _point(self, pid: int, tid: int, attempt: int, point: PointRecord) -> None:
        ts = self._us(point.ts_ns)
        if point.flow_id:
            self._arrows.add(attempt, point, f'"pid":{pid},"tid":{tid},"ts":{ts}', pid)
        elif point.kind == "instant":
            self._emit(
                f'{{"ph":"i","s":"t","pid":{pid},"tid":{tid},"name":{quote(point.name)},"cat":"libra.instant"'
                f',"ts":{ts},"args":{encode_details(_args(point))}}}'
            )
        elif point.value is not None:  # a viewer has no way to draw a value that is not a number
            value = encode_number(point.value)
            self._emit(f'{{"ph":"C","pid":{pid},"name":{quote(point.name)},"ts":{ts},"args":{{"value":{value}}}}}')

    def _emit(self, event: str) -> None:
        self._file.write(("\n" if self._num_events == 0 else ",\n") + event)
        self._num_events += 1

    def _us(self, ts_ns: int) -> str:
        return _us(ts_ns - self._run.start_ns)

    def _other_data(self, num_dropped: int) -> dict[str, Any]:
        clocks = {
            host: {"shift_ns": clock.shift_ns, "uncertainty_ns": clock.uncertainty_ns, "step_ns": clock.wall_step_ns}
            for host, clock in self._run.clocks.hosts.items()
        }
        return {
            "schema": SCHEMA,
            "run_start_ns": self._run.start_ns,
            "skipped_lines": self._bad_lines,
            "dropped_records": num_dropped,
            "unfinished_spans": self._num_unfinished,
            "flows_without_arrow": self._arrows.num_without_arrow,
            "clocks": clocks,
        }


def _args(record: SpanRecord | PointRecord) -> dict[str, Any]:
    known = {"step": record.step, "version": record.version}
    return {**record.details, **{name: value for name, value in known.items() if value is not None}}


def _us(duration_ns: int) -> str:
    """Nanoseconds as a decimal number of microseconds, exactly."""
    sign = "-" if duration_ns < 0 else ""
    whole, rest = divmod(abs(duration_ns), 1000)
    return f"{sign}{whole}.{rest:03d}"


@contextmanager
def _replacing(out: Path) -> Iterator[IO[str]]:
    """A text file that takes the place of `out` when the block ends well, and disappears when it does not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        if out.suffix == ".gz":
            with gzip.open(part, "wt", encoding="utf-8", compresslevel=6) as file:
                yield file
        else:
            with part.open("w", encoding="utf-8") as file:
                yield file
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
