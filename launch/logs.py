"""The logs of a run: all stages and ranks of an attempt in one stream, by time, each line with whose it is.

    python -m launch.logs RUN                     the last lines of everything
    python -m launch.logs RUN trainer             of all ranks of a role (trainer, controller, rollout, supervisor)
    python -m launch.logs RUN rollout_003         of one step: its ranks, its vLLM server, its srun
    python -m launch.logs RUN server -f           of all vLLM servers, and what they say from now on
    python -m launch.logs RUN trainer --rank 5 -n all --attempt 0

-f goes on with the next attempt, and ends when the run ends. Lines without a time stay behind the line before them in the same
file. Exit code 0; 2 when there is no such run, attempt, step or rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.log_files import LogFile, Part, chosen, last_lines, log_files, merged, text_lines
from launch.metrics import from_here
from launch.people import command
from launch.runs import Folder, NotARunError
from launch.truth import ENDED, SILENT_S, Stillness, tell_one
from launch.waiting import Pace

DEFAULT_LINES = 100
POLL_S = 0.25
QUIET_S = 1.0
"""After the run's last word its processes may still write for a moment."""
MOST_READ_BYTES = 4 << 20

Say = Callable[[str], None]


class NoSuchLogError(NotARunError):
    """The run has no log of that attempt, step or rank."""


@dataclass
class Selection:
    """Which lines: `who` is a role, a step or one file, "" for all; `rank` None for all."""

    who: str = ""
    rank: int | None = None

    def of(self, logs: Path) -> list[LogFile]:
        return chosen(log_files(logs), self.who, self.rank)

    def missing(self, logs: Path) -> str:
        """Why nothing fits, with what there is."""
        files = log_files(logs)
        if not files:
            return f"{from_here(logs)} has no log yet"
        of_step = chosen(files, self.who, None)
        if self.rank is not None and of_step:
            ranks = sorted({int(file.what) for file in of_step if file.what.isdigit()})
            shown = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else "".join(map(str, ranks)) or "none"
            return f"there is no rank {self.rank} of {self.who or 'this attempt'}; ranks: {shown}"
        names = sorted(
            {file.role for file in files} | {file.step for file in files} | {f.what for f in files if f.what}
        )
        return f"there is no log of {self.who!r}; there is {', '.join(name for name in names if not name.isdigit())}"


@dataclass
class Reader:
    """Follows the files of one selection: `tail` first, then `new` again and again."""

    logs: Path
    selection: Selection
    say: Say
    _offsets: dict[str, int] = field(default_factory=dict)
    _width: int = 0

    def of_attempt(self, logs: Path) -> Reader:
        """Goes on elsewhere; a log that another attempt goes on writing (the batch script's) is not begun anew."""
        return Reader(logs, self.selection, self.say, self._offsets, self._width)

    def tail(self, count: int | None, *, unfinished: bool) -> None:
        """The last `count` lines of all files together; None for all. `unfinished`: nothing is read after this."""
        parts = []
        for file in self.selection.of(self.logs):
            lines, self._offsets[os.path.realpath(file.path)] = last_lines(file.path, count, unfinished=unfinished)
            parts.append(Part(file, lines, _changed(file.path)))
        self._show(parts, count)

    def new(self, *, unfinished: bool = False) -> bool:
        """Lines that came since; True when there were any. A file that has shrunk is read from its beginning."""
        files = self.selection.of(self.logs)
        parts = [Part(file, lines, time.time()) for file in files if (lines := self._read(file, unfinished))]
        self._show(parts, None)
        return bool(parts)

    def _read(self, file: LogFile, unfinished: bool) -> list[str]:
        place = os.path.realpath(file.path)
        try:
            with file.path.open("rb") as handle:
                offset = self._offsets.get(place, 0)
                if handle.seek(0, os.SEEK_END) < offset:
                    offset = 0
                handle.seek(offset)
                data = handle.read(MOST_READ_BYTES)
        except OSError:  # there is none yet, or one of which `tail` has said that it cannot be read
            return []
        whole = data[: data.rfind(b"\n") + 1]
        if unfinished or (not whole and len(data) == MOST_READ_BYTES):
            whole = data
        self._offsets[place] = offset + len(whole)
        return text_lines(whole)

    def _show(self, parts: Iterable[Part], count: int | None) -> None:
        found = list(merged(parts))
        shown = found if count is None else found[max(0, len(found) - count) :]
        self._width = max([self._width, *(len(line.file.prefix) for line in shown)])
        for line in shown:
            self.say(f"{line.file.prefix:<{self._width}} | {line.text}")


def main(words: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(words)
    folder = Folder.at(asked.run)
    attempt = folder.run.attempt if asked.attempt is None else asked.attempt
    if attempt not in folder.attempts:
        known = ", ".join(map(str, folder.attempts)) or "none"
        raise NoSuchLogError(f"{from_here(folder.root)} has no attempt {attempt}; attempts: {known}")
    selection = Selection(asked.who or "", asked.rank)
    reader = Reader(folder.seen_at(attempt).run.logs, selection, _say)
    if not selection.of(reader.logs) and not asked.follow:
        raise NoSuchLogError(selection.missing(reader.logs))
    reader.tail(asked.lines, unfinished=not asked.follow)
    if asked.follow:
        follow(folder.seen_at(attempt), reader, goes_on=asked.attempt is None)
    return 0


def follow(
    folder: Folder,
    reader: Reader,
    *,
    goes_on: bool,
    sleep: Callable[[float], None] = time.sleep,
    poll_s: float = POLL_S,
) -> None:
    """Until the attempt has said its last word, or (`goes_on`) the run; then until its files are quiet."""
    end, quiet_s = _End(goes_on), 0.0
    while quiet_s < QUIET_S:
        if reader.new():
            quiet_s = 0.0
        elif end.has_come(folder):
            quiet_s += poll_s
        newest = folder.run.newest_attempt()
        if goes_on and newest > folder.run.attempt:
            reader.new(unfinished=True)
            reader.say(f"---- attempt {newest} ----")
            folder, quiet_s = folder.seen_at(newest), 0.0
            reader = reader.of_attempt(folder.run.logs)
        sleep(poll_s)
    reader.new(unfinished=True)


class _End:
    """Has the run, or this attempt of it, ended? Known at once from a last word; a silent run is looked at thoroughly."""

    def __init__(self, goes_on: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._goes_on = goes_on
        self._stillness, self._pace = Stillness(clock), Pace(5.0, 60.0, clock=clock)
        self._is_gone = False

    def has_come(self, folder: Folder) -> bool:
        state = folder.record(folder.run.state_json) or {}
        phase = state.get("phase")
        if phase in ENDED or (phase == "requeued" and not self._goes_on):
            return True
        if self._stillness.so_far_s(folder.run.attempt, state) <= SILENT_S:
            self._is_gone = False
        elif self._pace.due():
            self._is_gone = not tell_one(folder.root).is_alive
        return self._is_gone


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _say(text: str) -> None:
    print(text, flush=True)


def _lines(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of lines; a whole number, or all")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.logs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("who", metavar="WHO", nargs="?", help="role, step, or one log by its prefix")
    parser.add_argument("-f", "--follow", action="store_true", help="show what is written from now on")
    parser.add_argument(
        "-n", "--lines", type=_lines, default=DEFAULT_LINES, help="last lines shown, or all (default 100)"
    )
    parser.add_argument("--attempt", type=int, help="which attempt (default: the newest)")
    parser.add_argument("--rank", type=int, help="one rank only")
    return parser


if __name__ == "__main__":
    sys.exit(command(main))
