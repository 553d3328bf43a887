"""A filesystem that misbehaves as shared ones do, below one folder, for the product's own code.

    with FaultyFiles(run.root, [Late("weights/v*", looks=3), Failing("rename", "weights/*", errno.ENOSPC)]) as files:
        with files.on("node2"):
            ...

Each rule concerns the operations (`benchmarks.watched_files`) on paths that match its pattern (as in fnmatch, relative to the
folder; "*" also matches "/"). Threads belong to a host: what one host names, the others may see late.
"""

from __future__ import annotations

import fnmatch
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.watched_files import Operation, WatchedFiles


@dataclass
class Late:
    """Each other host looks `looks` times (a listing of the folder, an opening) before it sees a new name, or new content under it.

    So NFS does: it remembers for a while that there was no such file, or what it was. Not for folders that several hosts make:
    who is told by mkdir that there is one already also sees it then, which is not imitated.
    """

    pattern: str
    looks: int


@dataclass
class Failing:
    """The operations of `kind`, after the first `skip` of them, fail `times` times with `error` (errno.ESTALE, errno.ENOSPC, ...).

    The pattern of a rename is that of its target.
    """

    kind: str
    pattern: str
    error: int
    times: int = 1
    skip: int = 0


@dataclass
class Torn:
    """The first matching writing stores `keep` bytes only; then it fails with `error`, or (None) is reported as whole, as after
    a host that crashed before it had sent the rest."""

    pattern: str
    keep: int
    error: int | None = None
    done: bool = False


@dataclass
class Slow:
    """One reading gets `most_bytes` at most, and calls `pause` first."""

    pattern: str
    most_bytes: int
    pause: Callable[[], None] = lambda: None


Rule = Late | Failing | Torn | Slow


@dataclass
class _New:
    """A name that appeared, or got new content; `previous` keeps the old file, which other hosts go on seeing."""

    host: str
    looks: int
    previous: str = ""
    seen: dict[str, int] = field(default_factory=dict)

    def look(self, host: str) -> bool:
        """False while it is hidden from `host`, for whom this is one look more."""
        seen = self.seen.get(host, 0)
        self.seen[host] = seen + 1
        return host == self.host or seen >= self.looks


@dataclass(frozen=True)
class _OldEntry:
    """What a listing tells of a file whose new content is not yet seen."""

    name: str
    path: str
    number: int

    def inode(self) -> int:
        return self.number


class FaultyFiles(WatchedFiles):
    """See the module. `hook` is called before each operation, and may raise as well."""

    def __init__(self, root: Path, rules: Sequence[Rule] = (), hook: Callable[[Operation], None] | None = None) -> None:
        super().__init__(root)
        self.rules = list(rules)
        self._hook = hook
        self._here = threading.local()
        self._lock = threading.RLock()
        self._new: dict[str, _New] = {}
        self._kept = self.root.with_name(f".{self.root.name}.old-{secrets.token_hex(4)}")

    def __enter__(self) -> FaultyFiles:
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        shutil.rmtree(self._kept, ignore_errors=True)

    @property
    def host(self) -> str:
        """That of this thread; "" where nobody said."""
        return getattr(self._here, "host", "")

    @contextmanager
    def on(self, host: str) -> Iterator[None]:
        """This thread runs on `host`."""
        before, self._here.host = self.host, host
        try:
            yield
        finally:
            self._here.host = before

    # ---- failures --------------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        if self._hook is not None:
            self._hook(operation)
        path = operation.target or operation.path
        with self._lock:
            for rule in self._rules(Failing, path):
                if rule.kind == operation.kind and _is_due(rule):
                    raise OSError(rule.error, os.strerror(rule.error), path)
            if operation.kind == "rename":
                self._keep_old(operation.target)

    def store(self, path: str, data: Any, write: Callable[[Any], int]) -> int:
        for rule in self._rules(Torn, path):
            if not rule.done:
                rule.done = True
                written = write(data[: rule.keep])
                if rule.error is not None:
                    raise OSError(rule.error, os.strerror(rule.error), path)
                return written if written < rule.keep else len(data)
        return write(data)

    def most_bytes(self, path: str, wanted: int) -> int:
        for rule in self._rules(Slow, path):
            rule.pause()
            wanted = rule.most_bytes if wanted < 0 else min(wanted, rule.most_bytes)
        return wanted

    # ---- late sight ------------------------------------------------------------------------------------------------

    def after(self, operation: Operation) -> None:
        with self._lock:
            if operation.kind == "rename":
                self._forget(operation.path)
                self._note(operation.target)
            elif operation.kind in ("create", "mkdir") and operation.path not in self._new:
                self._note(operation.path)
            elif operation.kind == "remove":
                self._forget(operation.path)

    def place_of(self, path: str, real: str) -> str:
        if not self._new:
            return real
        with self._lock:
            for name in (path, *map(str, PurePosixPath(path).parents)):
                new = self._new.get(name)
                if new is not None and not new.look(self.host):
                    if name == path and new.previous:
                        return new.previous
                    return f"{real}.not-yet-seen"
        return real

    def entries_of(self, path: str, entries: list[os.DirEntry[str]]) -> list[Any]:
        shown: list[Any] = []
        with self._lock:
            for entry in entries:
                new = self._new.get(os.path.normpath(os.path.join(path, entry.name)))
                if new is None or new.look(self.host):
                    shown.append(entry)
                elif new.previous:
                    number = self.real("stat")(new.previous).st_ino
                    shown.append(_OldEntry(entry.name, entry.path, number))
        return shown

    def settle(self) -> None:
        """From now on all hosts see what is there."""
        with self._lock:
            self._new.clear()

    def _note(self, path: str) -> None:
        for rule in self._rules(Late, path):
            kept = self._kept / path.replace("/", "~")
            self._new[path] = _New(self.host, rule.looks, str(kept) if kept in self._olds() else "")

    def _keep_old(self, target: str) -> None:
        """Of a file that a rename is about to replace."""
        kept = self._kept / target.replace("/", "~")
        if not self._rules(Late, target):
            return
        self._kept.mkdir(mode=0o700, exist_ok=True)
        if kept in self._olds():
            kept.unlink()
        try:
            os.link(self.root / target, kept)
        except (FileNotFoundError, PermissionError):
            pass  # nothing is replaced, or a folder: that has another name before

    def _olds(self) -> list[Path]:
        return list(self._kept.iterdir()) if self._kept.is_dir() else []

    def _forget(self, path: str) -> None:
        for name in [name for name in self._new if name == path or name.startswith(f"{path}/")]:
            del self._new[name]

    def _rules(self, kind: type[Any], path: str) -> list[Any]:
        return [rule for rule in self.rules if isinstance(rule, kind) and fnmatch.fnmatchcase(path, rule.pattern)]


def _is_due(rule: Failing) -> bool:
    if rule.skip > 0:
        rule.skip -= 1
        return False
    rule.times -= 1
    return rule.times >= 0
