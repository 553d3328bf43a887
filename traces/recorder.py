"""Span recorder: one append-only JSON-lines file per process, cheap enough to leave on.

Schema `libra.phase_trace.v1`. Every record carries schema, rank, world_size, role, name, session, event, step
and phase. Events:

    anchor            wall_ns, monotonic_ns, offset_ns, hostname, boot_id, pid, num_slots, dropped,
                      reason (open | periodic | close)
    phase_start       ts_ns, thread, span_id, parent_id, version, details
    phase_span        start_ns, end_ns, duration_s, thread, span_id, parent_id, version, details
    phase_unfinished  as phase_span, for spans still open when the recorder is closed
    counter           ts_ns, value
    flow              ts_ns, flow (start | step | end), flow_id, thread, span_id, version
    instant           ts_ns, thread, span_id, version, details

Times are wall-clock nanoseconds computed as monotonic clock + the offset read when the file was opened, so a
duration can not be bent by a clock step; the anchors let a reader undo that offset.

A `phase_start` is written for every span, nested ones too (it costs 3 microseconds, `python -m benchmarks.traces`):
when a process is killed, the innermost phase is the one worth knowing.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import threading
import time
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType

from traces.appender import LineAppender
from traces.encoding import encode_details, encode_number, encode_optional_int, quote

SCHEMA = "libra.phase_trace.v1"
ANCHOR_PERIOD_S = 300.0
ROLES_WITHOUT_SLOTS = ("controller", "supervisor", "launch")

_current_span: ContextVar[Span | None] = ContextVar("libra_current_span", default=None)


class Recorder:
    """Writes the trace of one process; safe to use from any thread and any asyncio task.

    A failing disk never stops the stage, see `LineAppender`. A forked child must open its own recorder.

    Args:
        directory: folder of the trace files, made (mode 0700) when missing.
        role: "trainer", "rollout", "controller", ...; decides sorting and the ledger's side.
        rank: rank within the role, 0 or more (an instance's number, for rollout); part of the file name.
        world_size: number of processes of that step.
        name: names the process within the run, e.g. "trainer", "rollout_000"; part of the file name.
        enabled: when False, spans still measure time but nothing is written.
        num_slots: GPUs this process holds (CPU runs: worker slots), the weight of its seconds in the GPU-hour ledger.
            Default 1, or 0 for roles that hold none.

    Raises:
        ValueError: a negative rank, an empty world, or a name that is not a plain file name.
        OSError: the file can not be opened, for any reason except a full disk.
    """

    def __init__(
        self,
        directory: Path,
        role: str,
        rank: int,
        world_size: int,
        name: str,
        enabled: bool = True,
        *,
        num_slots: float | None = None,
    ) -> None:
        _validate(rank, world_size, name)
        self.path = Path(directory) / f"phase_trace_rank{rank:04d}.{name}.jsonl"
        self.offset_ns = time.time_ns() - time.monotonic_ns()
        self._num_slots = (0 if role in ROLES_WITHOUT_SLOTS else 1) if num_slots is None else num_slots
        self._prefix = (
            f'{{"schema":"{SCHEMA}","rank":{int(rank)},"world_size":{int(world_size)},"role":{quote(role)}'
            f',"name":{quote(name)},"session":"{secrets.token_hex(4)}","event":'
        )
        self._lock = threading.RLock()
        self._open_spans: dict[int, Span] = {}
        self._last_span_id = 0
        self._next_anchor_ns = 0
        self._file = LineAppender(self.path) if enabled else None
        if self._file is not None:
            self._write_anchor(self._file, "open")
            atexit.register(self.close)

    @property
    def dropped(self) -> int:
        """Records lost so far to a failing disk."""
        return 0 if self._file is None else self._file.dropped

    def span(self, phase: str, /, *, step: int | None = None, version: int | None = None, **details: object) -> Span:
        """A context manager that records one phase; step and version default to those of the enclosing span."""
        return Span(self, phase, step, version, details)

    def counter(self, name: str, value: float, /, *, step: int | None = None) -> None:
        """Record the value of a quantity from now on (queue length, tokens/s, staleness)."""
        if self._file is not None:
            self._write(
                f'"counter","step":{encode_optional_int(step)},"phase":{quote(name)}'
                f',"ts_ns":{self._wall_ns()},"value":{encode_number(value)}}}\n'
            )

    def flow_start(self, kind: str, id: str | int, /) -> None:
        """The thing `id` (a prompt, a trajectory, a batch, a version) leaves the current span."""
        self._flow("start", kind, id)

    def flow_step(self, kind: str, id: str | int, /) -> None:
        """The thing `id` passes through the current span."""
        self._flow("step", kind, id)

    def flow_end(self, kind: str, id: str | int, /) -> None:
        """The thing `id` arrives in the current span. Several arrivals of one start are a fan-out."""
        self._flow("end", kind, id)

    def instant(self, name: str, /, *, step: int | None = None, version: int | None = None, **details: object) -> None:
        """Record a moment (a NACK, a dropped group, a signal) in the current span."""
        if self._file is not None:
            self._write(
                f'"instant","phase":{quote(name)},"ts_ns":{self._wall_ns()}{self._place(step, version)}'
                f',"details":{encode_details(details)}}}\n'
            )

    def close(self) -> None:
        """Record spans still open as unfinished, write a last anchor, close the file; calling it again does nothing."""
        with self._lock:
            if self._file is None:
                return
            for span in list(self._open_spans.values()):
                self._write(span.record("phase_unfinished", time.monotonic_ns()))
            self._write_anchor(self._file, "close")
            self._file.close()
            self._file = None
        atexit.unregister(self.close)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def opened(self, span: Span) -> None:
        """Called by a span that begins: number it and record its start."""
        if self._file is not None:
            with self._lock:
                self._last_span_id += 1
                span.span_id = self._last_span_id
                self._open_spans[span.span_id] = span
            self._write(span.start_record())

    def ended(self, span: Span, now_ns: int) -> None:
        """Called by a span that ends; one that outlives `close` was recorded there as unfinished."""
        if self._file is not None and self._open_spans.pop(span.span_id, None) is not None:
            self._write(span.record("phase_span", now_ns))

    def _flow(self, direction: str, kind: str, id: str | int) -> None:
        if self._file is not None:
            self._write(
                f'"flow","phase":{quote(kind)},"ts_ns":{self._wall_ns()}{self._place(None, None)}'
                f',"flow":"{direction}","flow_id":{quote(str(id))}}}\n'
            )

    def _place(self, step: int | None, version: int | None) -> str:
        """Where a record without duration belongs: its thread and the span that is open around it."""
        span = _current_span.get()
        if span is None or span.recorder is not self:
            thread, span_id = threading.current_thread().name, None
        else:
            thread, span_id = span.thread, span.span_id
            step = span.step if step is None else step
            version = span.version if version is None else version
        return (
            f',"step":{encode_optional_int(step)},"version":{encode_optional_int(version)}'
            f',"thread":{quote(thread)},"span_id":{encode_optional_int(span_id)}'
        )

    def _wall_ns(self) -> int:
        return time.monotonic_ns() + self.offset_ns

    def _write(self, body: str) -> None:
        file = self._file  # another thread may close the recorder meanwhile
        if file is not None:
            file.write(self._prefix + body)
            if time.monotonic_ns() >= self._next_anchor_ns:
                self._write_anchor(file, "periodic")

    def _write_anchor(self, file: LineAppender, reason: str) -> None:
        monotonic_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        self._next_anchor_ns = monotonic_ns + int(ANCHOR_PERIOD_S * 1e9)
        file.write(
            f'{self._prefix}"anchor","step":null,"phase":"anchor","wall_ns":{wall_ns},"monotonic_ns":{monotonic_ns}'
            f',"offset_ns":{self.offset_ns},"hostname":{quote(socket.gethostname())},"boot_id":{quote(boot_id())}'
            f',"pid":{os.getpid()},"num_slots":{encode_number(self._num_slots)},"dropped":{file.dropped}'
            f',"reason":"{reason}"}}\n'
        )


class Span:
    """One phase being recorded; made by `Recorder.span`, used once, as a context manager.

    Spans of concurrent threads or asyncio tasks are independent: the enclosing span is found through a context
    variable, never by phase name. After the end, `duration_s` holds the length in seconds.
    """

    def __init__(
        self, recorder: Recorder, phase: str, step: int | None, version: int | None, details: dict[str, object]
    ) -> None:
        self.recorder = recorder
        self.phase = phase
        self.step = step
        self.version = version
        self.details = details
        self.thread = ""
        self.span_id = 0
        self.duration_s = 0.0
        self._outer: Span | None = None
        self._start_ns = 0
        self._identity = ""

    def add(self, *, step: int | None = None, version: int | None = None, **details: object) -> None:
        """Add what became known inside the phase; step and version correct those given at the start."""
        self.step = self.step if step is None else step
        self.version = self.version if version is None else version
        self.details.update(details)
        self._identity = ""

    def __enter__(self) -> Span:
        outer = self._outer = _current_span.get()
        if outer is not None and outer.recorder is self.recorder:
            self.step = outer.step if self.step is None else self.step
            self.version = outer.version if self.version is None else self.version
        self.thread = threading.current_thread().name
        _current_span.set(self)
        self._start_ns = time.monotonic_ns()
        self.recorder.opened(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        now_ns = time.monotonic_ns()
        self.duration_s = (now_ns - self._start_ns) / 1e9
        # Not reset(token): a span may be left in another context than it was entered in (async generators).
        _current_span.set(self._outer)
        if kind is not None:
            self.add(error=kind.__name__)
        self.recorder.ended(self, now_ns)

    def start_record(self) -> str:
        """The phase_start line, without the fields common to the whole file."""
        return f'"phase_start","ts_ns":{self._start_ns + self.recorder.offset_ns}{self._common()}\n'

    def record(self, event: str, now_ns: int) -> str:
        """The phase_span or phase_unfinished line, without the fields common to the whole file."""
        offset_ns = self.recorder.offset_ns
        return (
            f'"{event}","start_ns":{self._start_ns + offset_ns},"end_ns":{now_ns + offset_ns}'
            f',"duration_s":{(now_ns - self._start_ns) / 1e9:.9f}{self._common()}\n'
        )

    def _common(self) -> str:
        """What the start line and the end line share; computed once unless `add` changed it."""
        if not self._identity:
            outer = self._outer
            parent_id = None if outer is None or outer.recorder is not self.recorder else outer.span_id
            self._identity = (
                f',"step":{encode_optional_int(self.step)},"phase":{quote(self.phase)}'
                f',"version":{encode_optional_int(self.version)},"thread":{quote(self.thread)},"span_id":{self.span_id}'
                f',"parent_id":{encode_optional_int(parent_id)},"details":{encode_details(self.details)}}}'
            )
        return self._identity


def boot_id() -> str:
    """Identifies one boot of one kernel: processes that share it share the monotonic clock. Empty when unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _validate(rank: int, world_size: int, name: str) -> None:
    if rank < 0 or world_size < 1:
        raise ValueError(f"trace rank {rank} of a world of {world_size}: wanted 0 or more of 1 or more")
    if not name or name.startswith(".") or not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise ValueError(f"trace name {name!r} must be letters, digits, '_', '-' or '.': it is part of a file name")
