"""What of a version is whole already while the rest is being written, told to readers on the same host.

Each trainer rank appends a line for each part to a file of its own in the temporary folder, and deletes it before the folder gets its
name. The lines are hints: who reads ahead by them hashes what he has read, and compares that with the manifest when it is there.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from stages.rundir import RunDir

_NAME = re.compile(r"^\.parts\.\d+\.jsonl$")
_FOLDER = re.compile(r"^\.v(?P<version>\d{6,})\.tmp-(?P<attempt>\d+)-[0-9a-f]+$")
_WEIGHTS = re.compile(r"^[\w.-]+\.safetensors$", re.ASCII)
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LARGEST = 1 << 62
"""Bytes; larger numbers are none that the kernel takes for an offset."""
_LOOK_BYTES = 1 << 16
"""Read of each rank's file at a time; no line of a trainer is longer."""


@dataclass(frozen=True)
class Stretch:
    """A part in one piece: `length` bytes, from `offset` of `file` on, and from `first` of its tensor on."""

    name: str
    file: str
    offset: int
    first: int
    length: int


class ProgressWriter:
    """Of one rank. `add` may be called by several threads at once; nobody hears of it before `tell`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f".parts.{rank}.jsonl"
        self._lock = threading.Lock()
        self._untold: list[bytes] = []
        self._fd: int | None = None
        self._is_over = False

    def add(self, stretch: Stretch) -> None:
        """Its bytes are in the file."""
        line = json.dumps(astuple(stretch)).encode() + b"\n"
        with self._lock:
            if self._fd is not None:
                self._write(line)
            elif not self._is_over:
                self._untold.append(line)

    def tell(self) -> None:
        """From now on readers may take processors, and bandwidth of the memory: training does not wait for this version any more."""
        with self._lock:
            if not self._is_over and self._fd is None:
                self._write(b"".join(self._untold))

    def close(self) -> None:
        """And nothing of it is left. Harmless when repeated."""
        with self._lock:
            self._end()

    def _write(self, lines: bytes) -> None:
        """A disk that has no room for a hint may have some for the version; nobody misses what was not told."""
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.write(self._fd, lines)
        except OSError as problem:
            print(f"readers are not told what of {self._path.parent.name} is whole: {problem}", flush=True)
            self._end()

    def _end(self) -> None:
        self._is_over = True
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._path.unlink(missing_ok=True)


class ProgressReader:
    """`new` gives what came since the last time, of each rank so much at once that it does not take long."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[str, int] = {}
        self._begun: dict[str, bytes] = {}

    def new(self) -> list[Stretch]:
        """Raises FileNotFoundError when the folder is gone, or has its final name; then what was read is all there is."""
        for name in os.listdir(self._folder):
            if name not in self._fds and _NAME.match(name):
                with suppress(FileNotFoundError):  # of a rank that has ended meanwhile: others may still write
                    self._fds[name] = os.open(self._folder / name, _READ_FLAGS)
        return [stretch for name in self._fds for stretch in self._of(name)]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _of(self, name: str) -> list[Stretch]:
        data = self._begun.get(name, b"") + os.read(self._fds[name], _LOOK_BYTES)
        *lines, begun = data.split(b"\n")
        self._begun[name] = begun if len(begun) < _LOOK_BYTES else b""  # what comes of it is no line either
        return [stretch for line in lines if (stretch := _stretch(line)) is not None]


def unfinished(run: RunDir, newer_than: int) -> tuple[int, Path] | None:
    """The newest version above `newer_than` that this attempt is writing and tells about, with its temporary folder."""
    found = [
        (int(match["version"]), run.weights / name)
        for name in _names(run.weights)
        if (match := _FOLDER.match(name))
        and int(match["attempt"]) == run.attempt
        and int(match["version"]) > newer_than
    ]
    return max(((version, folder) for version, folder in found if any(map(_NAME.match, _names(folder)))), default=None)


def _names(folder: Path) -> Sequence[str]:
    """None in what is over meanwhile, or is no folder of ours, or a link: what nobody has asked for must not end an agent."""
    try:
        return os.listdir(folder) if stat.S_ISDIR(os.lstat(folder).st_mode) else ()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ()


def _stretch(line: bytes) -> Stretch | None:
    """None for what is no such line: it is a hint, and the part is read again."""
    try:
        name, file, offset, first, length = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    are_numbers = all(type(number) is int and 0 <= number < _LARGEST for number in (offset, first, length))
    if not are_numbers or type(name) is not str or type(file) is not str:
        return None
    return Stretch(name, file, offset, first, length) if _WEIGHTS.match(file) else None
