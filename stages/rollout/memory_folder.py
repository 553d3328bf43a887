"""The run's folder in the node's memory (/dev/shm): made by the first process that joins, removed after the last.

Every process that uses it shares a lock on a file in it for as long as it lives, so a folder whose lock is free belongs
to nobody: whoever leaves, or comes to the node with another run, removes it. Nothing else would: memory in /dev/shm
outlives processes that are killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stages.rollout.errors import RolloutError

_SHARED_MEMORY = Path("/dev/shm")
_USERS = "users.lock"


class ForeignFolderError(RolloutError):
    """The folder exists and belongs to somebody else."""


@dataclass(frozen=True)
class MemoryFolder:
    """`users_fd` holds the shared lock; it is closed with the process."""

    path: Path
    users_fd: int


def own_folder(folder: Path) -> Path:
    """`folder` with mode 0700, made when missing. Raises ForeignFolderError, FileNotFoundError when it was removed just now."""
    with suppress(FileExistsError):  # not `exist_ok`, which raises for a folder that is removed while it looks
        folder.mkdir(mode=0o700)
    if not _belongs_to_us(folder.lstat()):
        raise ForeignFolderError(f"{folder} is not a folder of user {os.geteuid()} with mode 0700")
    return folder


def is_own(folder: Path) -> bool:
    """Is it there, a folder and no link, of this user and closed to others?"""
    try:
        return _belongs_to_us(folder.lstat())
    except FileNotFoundError:
        return False


def _belongs_to_us(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def joined_memory_folder(run_id: str) -> MemoryFolder:
    """The run's folder, in use by this process from now on. Raises ForeignFolderError, OSError."""
    sweep_memory_folders()
    while True:
        try:
            path = own_folder(_place(run_id))
            fd = os.open(path / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            _SHARED_MEMORY.stat()  # raises where the node has no such memory
            continue  # removed by somebody who left just now
        fcntl.flock(fd, fcntl.LOCK_SH)
        if _is_current(fd, path / _USERS):
            return MemoryFolder(path, fd)
        os.close(fd)


def leave_memory_folder(run_id: str) -> None:
    """Remove the run's folder when no process uses it any more."""
    _remove_unused(_place(run_id))


def sweep_memory_folders() -> None:
    """Remove what killed processes of this user's runs left on this node."""
    for folder in _SHARED_MEMORY.glob(f"{_prefix()}*"):
        _remove_unused(folder)


def _prefix() -> str:
    return f"libra-{os.geteuid()}-"


def _place(run_id: str) -> Path:
    return _SHARED_MEMORY / f"{_prefix()}{run_id}"


def _remove_unused(folder: Path) -> None:
    if not is_own(folder):
        return  # somebody else could put another one in its place while it is emptied
    with _locked_alone(folder / _USERS) as is_unused:
        if is_unused:
            # The lock goes last: a folder without it, left by somebody who was killed over this, would be nobody's for ever.
            for path in [path for path in folder.iterdir() if path.name != _USERS]:
                with suppress(OSError):
                    path.unlink()
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked_alone(path: Path) -> Iterator[bool]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False  # no such file yet, or not ours
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Not a lock that was removed meanwhile: members may hold the one that has its name now.
        yield _is_current(fd, path)
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def _is_current(fd: int, path: Path) -> bool:
    """Whether the file that was locked still has its name."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False
