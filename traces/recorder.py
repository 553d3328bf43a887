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

Each record is one `write` to a file opened for append: a killed process loses nothing that it recorded, and the
`phase_start` record (written for every span, nested ones too) names what it was doing.
"""

from __future__ import annotations

import atexit
import errno
import os
import secrets
import socket
import sys
import threading
import time
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType

from traces.encoding import encode_details, encode_number, encode_optional_int, quote

SCHEMA = "libra.phase_trace.v1"
ANCHOR_PERIOD_S = 300.0
ROLES_WITHOUT_SLOTS = ("controller", "supervisor", "launch")

_current_span: ContextVar[Span | None] = ContextVar("libra_current_span", default=None)


class Recorder:
    """Writes the trace of one process; safe to use from any thread and any asyncio task.

    A failing disk never stops the stage: the first failure is reported on stderr, records that could not be written
    are counted, and the count is repeated by `close`. A forked child must open its own recorder.

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
        self.dropped = 0
        self._num_slots = (0 if role in ROLES_WITHOUT_SLOTS else 1) if num_slots is None else num_slots
        self._prefix = (
            f'{{"schema":"{SCHEMA}","rank":{int(rank)},"world_size":{int(world_size)},"role":{quote(role)}'
            f',"name":{quote(name)},"session":"{secrets.token_hex(4)}","event":'
        )
        # Re-entrant: a Python signal handler may record while the main thread is inside a write.
        self._lock = threading.RLock()
        self._open_spans: dict[int, Span] = {}
        self._last_span_id = 0
        self._needs_newline = False
        self._reported = False
        self._closed = False
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._next_anchor_ns = 0
        self._fd = self._open() if enabled else -1
        self._enabled = enabled
        if enabled:
            self._write_anchor("open")
            atexit.register(self.close)

    def span(self, phase: str, /, *, step: int | None = None, version: int | None = None, **details: object) -> Span:
        """A context manager that records one phase; step and version default to those of the enclosing span."""
        return Span(self, phase, step, version, details)

    def counter(self, name: str, value: float, /, *, step: int | None = None) -> None:
        """Record the value of a quantity from now on (queue length, tokens/s, staleness)."""
        if not self._enabled:
            return
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
        if not self._enabled:
            return
        span = self._enclosing()
        self._write(
            f'"instant","step":{encode_optional_int(step if step is not None or span is None else span.step)}'
            f',"phase":{quote(name)},"ts_ns":{self._wall_ns()}'
            f'{self._place(span, version)},"details":{encode_details(details)}}}\n'
        )

    def close(self) -> None:
        """Record spans still open as unfinished, write a last anchor, close the file; calling it again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._enabled:
                return
            atexit.unregister(self.close)
            for span in list(self._open_spans.values()):
                self._write(span.record("phase_unfinished", time.monotonic_ns()))
            self._write_anchor("close")
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
            if self.dropped:
                print(f"trace {self.path}: {self.dropped} records were lost", file=sys.stderr)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _flow(self, direction: str, kind: str, id: str | int) -> None:
        if not self._enabled:
            return
        span = self._enclosing()
        step = None if span is None else span.step
        self._write(
            f'"flow","step":{encode_optional_int(step)},"phase":{quote(kind)},"ts_ns":{self._wall_ns()}'
            f',"flow":"{direction}","flow_id":{quote(str(id))}{self._place(span, None)}}}\n'
        )

    def _enclosing(self) -> Span | None:
        span = _current_span.get()
        return span if span is not None and span.recorder is self else None

    def _place(self, span: Span | None, version: int | None) -> str:
        thread = threading.current_thread().name if span is None else span.thread
        if version is None and span is not None:
            version = span.version
        span_id = "null" if span is None else str(span.span_id)
        return f',"thread":{quote(thread)},"span_id":{span_id},"version":{encode_optional_int(version)}'

    def _wall_ns(self) -> int:
        return time.monotonic_ns() + self._offset_ns

    def _opened(self, span: Span) -> None:
        with self._lock:
            self._last_span_id += 1
            span.span_id = self._last_span_id
            self._open_spans[span.span_id] = span
        self._write(span.start_record())

    def _ended(self, span: Span, now_ns: int) -> None:
        # A span that outlives close() was recorded there as unfinished.
        if self._open_spans.pop(span.span_id, None) is not None and not self._closed:
            self._write(span.record("phase_span", now_ns))

    def _open(self) -> int:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            # A predecessor that was killed in the middle of a write may have left half a line.
            self._needs_newline = os.fstat(fd).st_size > 0
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._report(error)
            return -1
        return fd

    def _write_anchor(self, reason: str) -> None:
        monotonic_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        self._next_anchor_ns = monotonic_ns + int(ANCHOR_PERIOD_S * 1e9)
        self._write(
            f'"anchor","step":null,"phase":"anchor","wall_ns":{wall_ns},"monotonic_ns":{monotonic_ns}'
            f',"offset_ns":{self._offset_ns},"hostname":{quote(socket.gethostname())},"boot_id":{quote(boot_id())}'
            f',"pid":{os.getpid()},"num_slots":{encode_number(self._num_slots)},"reason":"{reason}"'
            f',"dropped":{self.dropped}}}\n'
        )

    def _write(self, body: str) -> None:
        with self._lock:
            if self._fd < 0:
                self.dropped += 1
                return
            line = (("\n" if self._needs_newline else "") + self._prefix + body).encode()
            try:
                self._needs_newline = os.write(self._fd, line) != len(line)
                if self._needs_newline:
                    raise OSError(errno.ENOSPC, "only part of a record was written")
            except OSError as error:
                self.dropped += 1
                self._report(error)
                return
        if time.monotonic_ns() >= self._next_anchor_ns:
            self._write_anchor("periodic")

    def _report(self, error: OSError) -> None:
        if not self._reported:
            self._reported = True
            print(f"trace {self.path}: {error}; the run goes on, records are being lost", file=sys.stderr)


class Span:
    """One phase being recorded; made by `Recorder.span`, used once, as a context manager."""

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
        self._parent: Span | None = None
        self._start_ns = 0

    def add(self, *, step: int | None = None, version: int | None = None, **details: object) -> None:
        """Add what became known inside the phase; step and version correct those given at the start."""
        if step is not None:
            self.step = step
        if version is not None:
            self.version = version
        self.details.update(details)

    def __enter__(self) -> Span:
        self._parent = _current_span.get()
        parent = self._parent
        if parent is not None and parent.recorder is self.recorder:
            if self.step is None:
                self.step = parent.step
            if self.version is None:
                self.version = parent.version
        self.thread = threading.current_thread().name
        _current_span.set(self)
        self._start_ns = time.monotonic_ns()
        if self.recorder._enabled:
            self.recorder._opened(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        now_ns = time.monotonic_ns()
        self.duration_s = (now_ns - self._start_ns) / 1e9
        # Not reset(token): a span may be left in another context than it was entered in (async generators).
        _current_span.set(self._parent)
        if kind is not None:
            self.details.setdefault("error", kind.__name__)
        if self.recorder._enabled:
            self.recorder._ended(self, now_ns)

    def start_record(self) -> str:
        """The phase_start line, without the fields common to the whole file."""
        start_ns = self._start_ns + self.recorder._offset_ns
        return f'"phase_start"{self._identity()},"ts_ns":{start_ns},"details":{encode_details(self.details)}}}\n'

    def record(self, event: str, now_ns: int) -> str:
        """The phase_span or phase_unfinished line, without the fields common to the whole file."""
        offset_ns = self.recorder._offset_ns
        return (
            f'"{event}"{self._identity()},"start_ns":{self._start_ns + offset_ns},"end_ns":{now_ns + offset_ns}'
            f',"duration_s":{(now_ns - self._start_ns) / 1e9:.9f},"details":{encode_details(self.details)}}}\n'
        )

    def _identity(self) -> str:
        parent = self._parent
        parent_id = "null" if parent is None or parent.recorder is not self.recorder else str(parent.span_id)
        return (
            f',"step":{encode_optional_int(self.step)},"phase":{quote(self.phase)}'
            f',"version":{encode_optional_int(self.version)},"thread":{quote(self.thread)}'
            f',"span_id":{self.span_id},"parent_id":{parent_id}'
        )


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
