"""Progress on a terminal (one live line block) or in a file (plain lines)."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Protocol, TextIO

from launch.metrics import COLUMNS, cells, evaluation_line, step_line

PLAIN_INTERVAL_S = 5.0


class Display(Protocol):
    def note(self, text: str) -> None: ...

    def step(self, record: dict[str, Any]) -> None: ...

    def waiting(self, text: str, *, is_news: bool) -> None:
        """What the run waits for, "" when for nothing; `is_news` when it is worth a line that stays."""
        ...

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PlainDisplay:
    """At most one step line in `interval_s` seconds, and always the first and the last step."""

    def __init__(self, out: TextIO, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._out = out
        self._interval_s = interval_s
        self._last_s = -interval_s

    def note(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def step(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        last = record["step"] + 1 == record["total_steps"]
        if now - self._last_s >= self._interval_s or last:
            self._last_s = now
            self.note(step_line(record))

    def waiting(self, text: str, *, is_news: bool) -> None:
        if text and is_news:
            self.note(text)

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveDisplay:
    """A table of the last steps under a progress bar, redrawn in place; notes scroll above it."""

    ROWS = 8

    def __init__(self, title: str) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._title = title
        self._records: list[dict[str, Any]] = []
        self._waiting = ""
        self._progress = Progress(TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._task = self._progress.add_task("steps", total=None)
        self._live = Live(self._progress, refresh_per_second=4)

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def step(self, record: dict[str, Any]) -> None:
        self._records = [*self._records, record][-self.ROWS :]
        self._progress.update(self._task, total=record["total_steps"], completed=record["step"] + 1)
        self._draw()

    def waiting(self, text: str, *, is_news: bool) -> None:
        if text != self._waiting:
            self._waiting = text
            self._draw()

    def _draw(self) -> None:
        from rich.console import Group, RenderableType
        from rich.table import Table
        from rich.text import Text

        table = Table(*COLUMNS, box=None, pad_edge=False)
        for shown in self._records:
            table.add_row(*cells(shown))
        parts: list[RenderableType] = [self._progress]
        parts += [Text(self._waiting)] if self._waiting else []
        parts += [table] if self._records else []
        self._live.update(Group(*parts))

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


def choose_display(title: str, out: TextIO | None = None) -> Display:
    out = out or sys.stdout
    return LiveDisplay(title) if out.isatty() else PlainDisplay(out)


def show(display: Display, record: dict[str, Any]) -> None:
    """One record of metrics.jsonl; events that the display does not know are left to the file."""
    if record.get("event") == "evaluation":
        display.note(evaluation_line(record))
    elif "event" not in record:
        display.step(record)
