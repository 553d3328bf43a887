"""The logs of an attempt: which file is whose, its last lines, and the times that lines carry.

supervisor.log              the batch script and the supervisor
trainer.0.log               rank 0 of the step `trainer`
rollout_000.1.0.log         rank 0 of `rollout_000`, started for the second time
rollout_000.server.log      its vLLM server
rollout_000.srun.log        what srun said about the step
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import merge
from pathlib import Path

from stages.files import names_if_any

SUPERVISOR = "supervisor"
BLOCK_BYTES = 64 << 10
MOST_TAIL_BYTES = 16 << 20
"""How far back lines are looked for; a log may be one endless line."""
MOST_LINE_CHARS = 4000
_NAME = re.compile(r"^(?P<step>[A-Za-z][A-Za-z0-9_-]*)(?:\.(?P<again>\d+))?\.(?P<what>\d+|server|srun)\.log$")


@dataclass(frozen=True)
class LogFile:
    """`step` is its step's name; `what` is a rank's number, "server", "srun", or "" for the supervisor's; `again` counts restarts."""

    path: Path
    step: str
    what: str = ""
    again: int = 0

    @property
    def prefix(self) -> str:
        """trainer.3, rollout_000.server, rollout_000#1.0 (started again once), supervisor."""
        return f"{self.step}{f'#{self.again}' if self.again else ''}{f'.{self.what}' if self.what else ''}"

    @property
    def role(self) -> str:
        """trainer, controller, rollout, supervisor: a step's name without its number."""
        return re.sub(r"_\d+$", "", self.step)

    @property
    def order(self) -> tuple[int, str, int, int, str]:
        """Supervisor first, then by step, start and rank; of a rank before what belongs to the step as a whole."""
        rank = int(self.what) if self.what.isdigit() else 1 << 30
        return (0 if self.step == SUPERVISOR else 1, self.step, self.again, rank, self.what)


def log_files(logs: Path) -> list[LogFile]:
    """Every log in an attempt's folder `logs`, in their order; files of other names are left out."""
    found = []
    for name in names_if_any(logs):
        match = _NAME.match(name)
        if name == f"{SUPERVISOR}.log":
            found.append(LogFile(logs / name, SUPERVISOR))
        elif match:
            found.append(LogFile(logs / name, match["step"], match["what"], int(match["again"] or 0)))
    return sorted(found, key=lambda file: file.order)


def chosen(files: Iterable[LogFile], who: str, rank: int | None) -> list[LogFile]:
    """Those of a role, a step or a single file (trainer, rollout_000, rollout_000.server, server), and of one rank."""
    return [
        file
        for file in files
        if who in ("", file.role, file.step, file.prefix, file.what) and (rank is None or file.what == str(rank))
    ]


def last_lines(path: Path, count: int | None, *, unfinished: bool = False) -> tuple[list[str], int]:
    """The last `count` lines (None: all) and the offset behind them. Of a big file only the end is read.

    A last line without its end is left for later, or taken with `unfinished`. Empty when there is no file; one line that says why when it
    cannot be read.
    """
    try:
        with path.open("rb") as handle:
            start = handle.seek(0, os.SEEK_END)
            data = b""
            while start > 0 and (count is None or data.count(b"\n") <= count) and len(data) < MOST_TAIL_BYTES:
                block_bytes = min(start, BLOCK_BYTES if count is not None else start)
                start = handle.seek(start - block_bytes)
                data = handle.read(block_bytes) + data
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        return [f"(cannot be read: {error.strerror})"], 0
    whole = data if unfinished else data[: data.rfind(b"\n") + 1]
    lines = text_lines(whole)
    if start > 0:
        lines = lines[1:]  # its beginning lies in a block that was not read
    return (lines if count is None else lines[max(0, len(lines) - count) :]), start + len(whole)


def text_lines(data: bytes) -> list[str]:
    """Lines as a terminal would show them: of what a progress bar has written over itself the last state; long ones cut."""
    lines = data.decode("utf-8", "replace").split("\n")
    return [_shown(line) for line in (lines if lines[-1] else lines[:-1])]


def _shown(line: str) -> str:
    line = line.rstrip("\r").rpartition("\r")[2]
    return line if len(line) <= MOST_LINE_CHARS else f"{line[:MOST_LINE_CHARS]} ... ({len(line):,} characters)"


# ---- times -----------------------------------------------------------------------------------------------------------

_FULL = re.compile(r"\b(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_VLLM = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d) (\d\d:\d\d:\d\d)\b")
_CLOCK = re.compile(r"^(\d\d):(\d\d):(\d\d) ")
_LOOK_CHARS = 120
_HALF_DAY_S = 43200.0


def line_time(line: str, near: float) -> float | None:
    """Wall clock of a line that carries one, in s: submitit's and ISO dates, vLLM's (no year), the supervisor's (time only).

    `near` is a time close to it: it gives the year and the day that the line leaves out.
    """
    head = line[:_LOOK_CHARS]
    if match := _FULL.search(head):
        return _parsed(f"{match[1]} {match[2]}.{(match[3] or '0'):0<6}")
    if match := _VLLM.search(head):
        return _parsed(f"{time.localtime(near).tm_year}-{match[1]} {match[2]}.000000")
    if match := _CLOCK.match(head):
        day = time.strftime("%Y-%m-%d", time.localtime(near))
        found = _parsed(f"{day} {match[0].strip()}.000000")
        return found if found is None else _of_day(found, near)
    return None


def _of_day(found: float, near: float) -> float:
    """The same time of the day before or after, when that is nearer."""
    if found - near > _HALF_DAY_S:
        return found - 2 * _HALF_DAY_S
    return found + 2 * _HALF_DAY_S if near - found > _HALF_DAY_S else found


def _parsed(text: str) -> float | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S.%f").timestamp()
    except ValueError:
        return None


@dataclass(frozen=True)
class Line:
    at: float
    file: LogFile
    text: str


@dataclass(frozen=True)
class Part:
    """Lines of one file; `near` is a time close to the last of them (the file's own, when it was changed)."""

    file: LogFile
    lines: Sequence[str]
    near: float


def merged(parts: Iterable[Part]) -> Iterator[Line]:
    """Lines of several logs by time. The order within a file stays; a line without a time goes with the one before it, lines
    before the first time of a file with that, and a file without any time counts as written when it was changed last."""
    return merge(
        *(list(_timed(part)) for part in sorted(parts, key=lambda part: part.file.order)), key=lambda line: line.at
    )


def _timed(part: Part) -> Iterator[Line]:
    times = [line_time(line, part.near) for line in part.lines]
    at = next((found for found in times if found is not None), part.near)
    for line, found in zip(part.lines, times, strict=True):
        at = at if found is None else max(at, found)
        yield Line(at, part.file, line)
