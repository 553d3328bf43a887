"""File operations below one folder, seen one by one: to count them here, and to make them fail in `tests.faulty_files`.

Python's calls in `os` and `io.open` are replaced while a `WatchedFiles` is entered; what goes to other folders passes through.
What C code does by itself (a memory map, a descriptor of another process) is not seen.
"""

from __future__ import annotations

import builtins
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("open", "create", "read", "write", "flush", "list", "rename", "remove", "mkdir", "stat")
_PATH_CALLS = {
    "unlink": "remove",
    "remove": "remove",
    "rmdir": "remove",
    "mkdir": "mkdir",
    "stat": "stat",
    "lstat": "stat",
}
_REPLACED = (
    *_PATH_CALLS,
    *("open", "close", "fdopen", "scandir", "listdir", "rename", "replace", "fsync"),
    *("read", "write", "pwrite", "pread", "preadv"),
)


@dataclass(frozen=True)
class Operation:
    """`kind` is one of KINDS; `path` and `target` (of a rename) are relative to the watched folder, "." for itself."""

    kind: str
    path: str
    target: str = ""


class WatchedFiles:
    """A context manager, one at a time in a process. `counts` holds the operations of each kind."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.counts: Counter[str] = Counter()
        self._prefix = f"{self.root}{os.sep}"
        self._fds: dict[int, str] = {}
        self._real: dict[str, Callable[..., Any]] = {}

    # ---- what subclasses change ------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        """Called before each operation, in the thread that wants it; what it raises takes the operation's place."""

    def after(self, operation: Operation) -> None:
        """Called after each operation that succeeded."""

    def place_of(self, path: str, real: str) -> str:
        """The path that is opened, or looked at, in place of `real`."""
        return real

    def entries_of(self, path: str, entries: list[os.DirEntry[str]]) -> list[Any]:
        """What a listing of `path` shows of its `entries`."""
        return entries

    def store(self, path: str, data: Any, write: Callable[[Any], int]) -> int:
        """Hand `data` (or less) to `write`; returns what is reported as written."""
        return write(data)

    def most_bytes(self, path: str, wanted: int) -> int:
        """How much of `wanted` (-1: all) one reading may get."""
        return wanted

    # ---- entering and leaving --------------------------------------------------------------------------------------

    def __enter__(self) -> WatchedFiles:
        self._real = {name: getattr(os, name) for name in _REPLACED} | {"io.open": io.open}
        for name in _REPLACED:
            setattr(os, name, getattr(self, f"_{name}", None) or self._path_call(name))
        io.open = builtins.open = self._io_open
        return self

    def __exit__(self, *_: object) -> None:
        for name in _REPLACED:
            setattr(os, name, self._real[name])
        io.open = builtins.open = self._real["io.open"]

    def real(self, name: str) -> Callable[..., Any]:
        """The call itself, unwatched; `name` as in os."""
        return self._real.get(name) or getattr(os, name)

    def relative(self, path: Any, dir_fd: int | None = None) -> str | None:
        """None for what is not watched."""
        if isinstance(path, int):
            return self._fds.get(path)
        text: str | bytes = os.fspath(path)
        if isinstance(text, bytes):
            text = os.fsdecode(text)
        if dir_fd is not None:
            folder = self._fds.get(dir_fd)
            return None if folder is None else os.path.normpath(os.path.join(folder, text))
        if text.startswith(self._prefix):
            return os.path.normpath(text[len(self._prefix) :])
        return "." if text == str(self.root) else None

    def perform(self, operation: Operation, call: Callable[[], Any]) -> Any:
        self.counts[operation.kind] += 1
        self.before(operation)
        result = call()
        self.after(operation)
        return result

    # ---- the calls -------------------------------------------------------------------------------------------------

    def _path_call(self, name: str) -> Callable[..., Any]:
        call, kind = self._real[name], _PATH_CALLS[name]

        def watched(path: Any, *arguments: Any, **options: Any) -> Any:
            relative = self.relative(path, options.get("dir_fd"))
            if relative is None:
                return call(path, *arguments, **options)

            def perform() -> Any:
                is_look = kind == "stat" and not isinstance(path, int) and options.get("dir_fd") is None
                return call(self.place_of(relative, os.fspath(path)) if is_look else path, *arguments, **options)

            return self.perform(Operation(kind, relative), perform)

        return watched

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        relative, real = self.relative(path, dir_fd), self._real["open"]
        if relative is None:
            return int(real(path, flags, mode, dir_fd=dir_fd))

        def perform() -> int:
            is_look = not flags & os.O_CREAT and dir_fd is None
            return int(real(self.place_of(relative, os.fspath(path)) if is_look else path, flags, mode, dir_fd=dir_fd))

        fd: int = self.perform(Operation("create" if flags & os.O_CREAT else "open", relative), perform)
        self._fds[fd] = relative
        return fd

    def _close(self, fd: int) -> None:
        self._fds.pop(fd, None)
        self._real["close"](fd)

    def _fdopen(self, fd: int, *arguments: Any, **options: Any) -> Any:
        relative = self._fds.get(fd)
        file = self._real["io.open"](fd, *arguments, **options)
        return file if relative is None else _WatchedFile(self, relative, file)

    def _io_open(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        relative, real = self.relative(file), self._real["io.open"]
        if relative is None or isinstance(file, int):
            return real(file, mode, *arguments, **options)
        is_look = "r" in mode and "+" not in mode

        def perform() -> Any:
            return real(self.place_of(relative, os.fspath(file)) if is_look else file, mode, *arguments, **options)

        opened = self.perform(Operation("open" if is_look else "create", relative), perform)
        self._fds[opened.fileno()] = relative
        return _WatchedFile(self, relative, opened)

    def _scandir(self, path: Any = ".") -> Any:
        relative, real = self.relative(path), self._real["scandir"]
        if relative is None:
            return real(path)

        def perform() -> list[Any]:
            with real(path) as found:
                return self.entries_of(relative, list(found))

        return _Entries(self.perform(Operation("list", relative), perform))

    def _listdir(self, path: Any = ".") -> list[str]:
        if self.relative(path) is None:
            return list(self._real["listdir"](path))
        with self._scandir(path) as entries:
            return [entry.name for entry in entries]

    def _rename(self, source: Any, target: Any, **options: Any) -> None:
        self._renamed("rename", source, target, options)

    def _replace(self, source: Any, target: Any, **options: Any) -> None:
        self._renamed("replace", source, target, options)

    def _renamed(self, name: str, source: Any, target: Any, options: dict[str, Any]) -> None:
        old, new, real = self.relative(source), self.relative(target), self._real[name]
        if old is None or new is None:
            real(source, target, **options)
        else:
            self.perform(Operation("rename", old, new), lambda: real(source, target, **options))

    def _fsync(self, fd: int) -> None:
        self._on_fd("flush", fd, lambda: self._real["fsync"](fd))

    def _on_fd(self, kind: str, fd: int, call: Callable[[], Any]) -> Any:
        relative = self._fds.get(fd)
        return call() if relative is None else self.perform(Operation(kind, relative), call)

    def _write(self, fd: int, data: Any) -> int:
        return self._stored(fd, data, lambda part: int(self._real["write"](fd, part)))

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        return self._stored(fd, data, lambda part: int(self._real["pwrite"](fd, part, offset)))

    def _stored(self, fd: int, data: Any, write: Callable[[Any], int]) -> int:
        relative = self._fds.get(fd)
        if relative is None:
            return write(data)
        return int(self.perform(Operation("write", relative), lambda: self.store(relative, data, write)))

    def _read(self, fd: int, length: int) -> Any:
        return self._on_fd("read", fd, lambda: self._real["read"](fd, self._most(fd, length)))

    def _pread(self, fd: int, length: int, offset: int) -> Any:
        return self._on_fd("read", fd, lambda: self._real["pread"](fd, self._most(fd, length), offset))

    def _preadv(self, fd: int, buffers: list[Any], offset: int, *flags: int) -> Any:
        def perform() -> Any:
            first = memoryview(buffers[0])
            most = self._most(fd, len(first))
            return self._real["preadv"](fd, buffers if most >= len(first) else [first[:most]], offset, *flags)

        return self._on_fd("read", fd, perform)

    def _most(self, fd: int, wanted: int) -> int:
        relative = self._fds.get(fd)
        return wanted if relative is None else self.most_bytes(relative, wanted)


class _Entries:
    """What os.scandir returns."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __enter__(self) -> Iterator[Any]:
        return self._entries

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def close(self) -> None:
        self._entries = iter(())


class _WatchedFile:
    """A file object whose readings and writings are operations."""

    def __init__(self, files: WatchedFiles, path: str, file: Any) -> None:
        self._files, self._path, self._file = files, path, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _WatchedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def close(self) -> None:
        if not self._file.closed:
            self._files._fds.pop(self._file.fileno(), None)
            self._file.close()

    def write(self, data: Any) -> int:
        store = self._files.store
        operation = Operation("write", self._path)
        return int(self._files.perform(operation, lambda: store(self._path, data, self._file.write)))

    def read(self, size: int = -1) -> Any:
        def perform() -> Any:
            found = self._file.read(self._files.most_bytes(self._path, size))
            while size < 0 and (more := self._file.read(self._files.most_bytes(self._path, size))):
                found += more
            return found

        return self._files.perform(Operation("read", self._path), perform)
