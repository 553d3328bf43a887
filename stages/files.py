"""Atomic records on a shared filesystem, and waiting for them.

The rules come from how NFS and Lustre behave: a file appears by rename only, a name is looked for by
listing its parent directory (an NFS client may cache "does not exist" for `acdirmax`, 60 s), and every wait has a
deadline and says what it waited for and from whom.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")

POLL_FIRST_S = 0.005
POLL_LAST_S = 0.5
POLL_SHARE = 0.01
"""`wait_for` looks again after this share of the time waited, within the two limits: late by at most as much."""
_FSYNC_THREADS = 8
_PROCESS = uuid.uuid4().hex[:8]
"""Marks, with the process's number, its temporaries: a sweep of its own must not take what it is writing for a leftover."""
_STALE_RETRIES = 3


class DamagedRecordError(ValueError):
    """A record is there, but is not a JSON object."""


class WaitTimeoutError(TimeoutError):
    """Something that another process had to write did not appear before the deadline."""

    def __init__(self, awaited: str, from_whom: str, waited_s: float) -> None:
        super().__init__(f"waited {waited_s:.1f} s for {awaited} from {from_whom}; it did not come")
        self.awaited = awaited
        self.from_whom = from_whom
        self.waited_s = waited_s


def fsync_path(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable (names already are on NFS)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_paths(paths: Sequence[Path]) -> None:
    """`fsync_path` of all at the same time: a journalling filesystem serves those that wait together with one commit."""
    with ThreadPoolExecutor(min(_FSYNC_THREADS, max(1, len(paths)))) as pool:
        for done in [pool.submit(fsync_path, path) for path in paths]:
            done.result()


def write_bytes_atomic(path: Path, data: bytes, *, flush: bool = True) -> None:
    """Write-temp, fsync, rename, fsync of the directory. Readers see the old file or the whole new one; mode 0600.

    Without `flush` it waits for no disk, however busy: so do readers on this host, but only as long as it lives. A crash of it may
    leave the old file, none, an empty one, zeros, or the beginning of the new one.
    """
    temporary = path.with_name(f".{path.name}.{_process_mark()}{uuid.uuid4().hex[:8]}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as handle:
            if data and not flush:
                os.posix_fallocate(
                    fd, 0, len(data)
                )  # else ext4 begins to write it out when it takes the place of another
            handle.write(data)
            handle.flush()
            if flush:
                os.fsync(handle.fileno())
        if flush:
            os.replace(temporary, path)
        else:
            _replace_at_once(temporary, path)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        problem.filename = problem.filename or str(path)  # what asks about a descriptor names no file
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if flush:
        fsync_path(path.parent)


def _replace_at_once(temporary: Path, path: Path) -> None:
    """`os.replace`, but a thread waits for the end of the old file.

    A file goes with its last name or descriptor, and then waits for the disk: for what of it is being written, on some mounts for the
    discard of its blocks. Beside 3 GB that were written back that took 0.03 to 0.3 s (ext4, kernel 6.18).
    """
    try:
        old = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        os.replace(temporary, path)
        return
    try:
        os.replace(temporary, path)
    finally:
        try:
            threading.Thread(target=os.close, args=(old,), name="old record", daemon=True).start()
        except RuntimeError:  # no thread is to be had: a limit of processes is reached, or this one is about to end
            os.close(old)


def is_own_temporary(name: str) -> bool:
    """Is `name` that of a record which this process is writing, or failed to?"""
    return name.endswith(".tmp") and name.split(".")[-2].startswith(_process_mark())


def _process_mark() -> str:
    return f"{_PROCESS}-{os.getpid():x}-"


def json_text(payload: dict[str, Any]) -> str:
    """One line for each key, sorted. Not indented further: that takes json's slow encoder, seconds for a large manifest."""
    lines = (f" {json.dumps(key)}: {json.dumps(payload[key], sort_keys=True)}" for key in sorted(payload))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_json_atomic(path: Path, payload: dict[str, Any], *, flush: bool = True) -> None:
    write_bytes_atomic(path, json_text(payload).encode(), flush=flush)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None when there is no such file yet.

    An NFS client may remember for a minute that the file was missing; listing its directory makes it look again, so a
    loop around this function sees a new file as soon as a loop around `list_names` does.
    Raises DamagedRecordError for anything else: records appear by rename, so a half one is damage, not haste; a crash of the host
    does it to one that was not flushed.
    """
    return read_json_inode(path)[1]


def read_json_inode(path: Path) -> tuple[int, dict[str, Any] | None]:
    """As `read_json`, with the inode number of the file that was read (0: none): that of `list_inodes`, unless it was replaced
    meanwhile, or the client still had its predecessor in mind.
    """
    found = _read_text(path)
    if found is None and path.name in list_names(path.parent):
        found = _read_text(path)
    if found is None:
        return 0, None
    inode, text = found
    try:
        value = json.loads(text)
    except ValueError as problem:
        raise DamagedRecordError(f"{path} is not JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise DamagedRecordError(f"{path} holds {type(value).__name__}, wanted a JSON object")
    return inode, value


def _read_text(path: Path) -> tuple[int, str] | None:
    for attempt in range(_STALE_RETRIES):
        try:
            with path.open(encoding="utf-8") as handle:
                return os.fstat(handle.fileno()).st_ino, handle.read()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as problem:
            raise DamagedRecordError(f"{path} is not text: {problem}") from problem
        except OSError as error:
            # NFS: another host replaced the file between our open and our read; the name leads to the new one.
            if error.errno != errno.ESTALE or attempt == _STALE_RETRIES - 1:
                raise
    return None


def list_names(directory: Path) -> list[str]:
    """Sorted names in `directory` without temporaries; empty when the directory does not exist yet."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith("."))
    except FileNotFoundError:
        return []


def names_if_any(directory: Path) -> list[str]:
    """As `list_names`, for readers of what others left: empty too where it is no folder, or one that may not be read."""
    try:
        return list_names(directory)
    except OSError:
        return []


def list_inodes(directory: Path) -> dict[str, int]:
    """As `list_names`, with each name's inode number as the listing tells it (no further operation); 0 where it tells none."""
    try:
        with os.scandir(directory) as entries:
            return {entry.name: entry.inode() for entry in entries if not entry.name.startswith(".")}
    except FileNotFoundError:
        return {}


def make_directory(path: Path) -> Path:
    """Create `path` and its missing parents, all with mode 0700; harmless when another process made them first."""
    for missing in reversed([parent for parent in (path, *path.parents) if not parent.is_dir()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    return path


def remove_tree(path: Path) -> bool:
    """Remove a directory; False when a file in it is still open, so that something stays until the next attempt.

    NFS keeps an open file under another name, which makes its directory "not empty" or "busy".
    """
    try:
        shutil.rmtree(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise
        return False
    return True


def wait_for(
    look: Callable[[], Found | None],
    *,
    deadline_s: float,
    awaited: str,
    from_whom: str,
    check: Callable[[], None] | None = None,
) -> Found:
    """Call `look` with growing pauses until it returns something other than None.

    `look` must list directories or open files, never ask `exists()`. `check` runs between looks and raises to give up
    early (a stop was asked for, the other side reported a failure). Raises WaitTimeoutError after `deadline_s` seconds.
    """
    started = time.monotonic()
    while True:
        found = look()
        if found is not None:
            return found
        if check is not None:
            check()
        waited_s = time.monotonic() - started
        if waited_s >= deadline_s:
            raise WaitTimeoutError(awaited, from_whom, waited_s)
        pause_s = min(max(POLL_FIRST_S, POLL_SHARE * waited_s), POLL_LAST_S)
        time.sleep(min(pause_s, max(0.0, deadline_s - waited_s)))
