"""A folder on the node itself, for what a shared filesystem cannot do: sockets and locks.

Whoever uses it holds a shared lock on a file in it until the process ends, however it ends. So a folder that nobody holds is a
leftover, and may be removed by anybody: at the end of its own run, or by the next run of the same user that starts on the node.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.files import WaitTimeoutError
from stages.process import environments
from stages.rollout.memory_folder import ForeignFolderError, is_own, leave_memory_folder, sweep_memory_folders
from stages.rollout.shared_memory import remove_shared_memory

_MAX_SOCKET_FOLDER_LENGTH = 50  # a Unix socket's path has at most 107 characters; vLLM appends up to 37, we up to 20
_LOCK_POLL_S = 0.02
_HELD = "held"
_LAST_OUT_S = 2.0
"""For the locks of processes that were just killed to be gone."""
_UNLOCKED_S = 3600.0
"""A folder without the lock file is of an older version, whose processes hold none: a younger one may be in use."""
_holds: dict[Path, int] = {}
"""Folder -> descriptor of its lock file, which this process keeps until it leaves the folder or ends."""


def node_folder(run_id: str) -> Path:
    """The run's own folder on this node, mode 0700, made when missing and held from now on. Raises ForeignFolderError."""
    folder = node_folder_path(run_id)
    while True:
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            is_new = False
        else:
            is_new = True
        if not is_own(folder):
            if not folder.exists():
                continue  # somebody has just removed it
            raise ForeignFolderError(f"{folder} is not a folder of user {os.geteuid()} with mode 0700")
        if _hold(folder):
            break
    if is_new:
        sweep_node_folders()
    return folder


def node_folder_path(run_id: str) -> Path:
    """Where `node_folder` is, or would be; nothing is made."""
    return _base() / f"libra-{os.geteuid()}-{run_id}"


def remove_node_folder(run_id: str) -> None:
    """Remove the run's folders with all that killed instances left in them, unless a living process holds them."""
    leave_memory_folder(run_id)
    folder = node_folder_path(run_id)
    _release(folder)
    end_s = time.monotonic() + _LAST_OUT_S
    while is_own(folder) and not _remove_unheld(folder) and time.monotonic() < end_s:
        time.sleep(_LOCK_POLL_S)
    for begun in filter(is_own, folder.parent.glob(f"{folder.name}.*")):
        _remove_unheld(begun)  # by an instance that was killed over it


def leave_node_folder(run_id: str) -> None:
    """For the end of an instance: the last one takes the folders with it."""
    leave_memory_folder(run_id)
    folder = node_folder_path(run_id)
    _release(folder)
    if is_own(folder):
        _remove_unheld(folder)


def remove_scratch(scratch: Path) -> None:
    """What a server that runs no more had here, and the shared memory that it left."""
    if scratch.is_dir():
        remove_shared_memory(scratch)
        shutil.rmtree(scratch, ignore_errors=True)


def sweep_node_folders() -> list[Path]:
    """Remove the folders on this node that runs of this user left and no process holds; returns those for sockets and locks."""
    sweep_memory_folders()
    return [folder for folder in sorted(_base().glob(f"libra-{os.geteuid()}-*")) if _is_left(folder)]


def _is_left(folder: Path) -> bool:
    """Whether it was, and is removed. What cannot be looked at is no reason not to start a run."""
    try:
        is_left = is_own(folder) and ((folder / _HELD).exists() or _is_old(folder))
        return is_left and _remove_unheld(folder)
    except OSError:
        return False


def _is_old(folder: Path) -> bool:
    """Of an older version, or half removed. Raises FileNotFoundError."""
    run_id = folder.name.split("-")[2].partition(".")[0].encode()
    return time.time() - folder.stat().st_mtime > _UNLOCKED_S and not any(run_id in text for text in environments())


def _base() -> Path:
    base = Path(tempfile.gettempdir())
    return Path("/tmp") if len(str(base)) > _MAX_SOCKET_FOLDER_LENGTH - 30 else base


# ---- who holds it ----------------------------------------------------------------------------------------------------


def _open_lock(folder: Path) -> int | None:
    """None when the folder is gone."""
    try:
        return os.open(folder / _HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _hold(folder: Path) -> bool:
    """False when the folder was removed meanwhile: then it has to be made again."""
    held = _holds.get(folder)
    if held is not None:
        if _is_at(held, folder / _HELD):
            return True
        _release(folder)
    fd = _open_lock(folder)
    if fd is None:
        return False
    fcntl.flock(fd, fcntl.LOCK_SH)  # whoever has it alone is about to rename the folder, which takes no time
    if not _is_at(fd, folder / _HELD):
        os.close(fd)
        return False
    if not _holds:
        atexit.register(_leave_all)
    _holds[folder] = fd
    return True


def _release(folder: Path) -> None:
    fd = _holds.pop(folder, None)
    if fd is not None:
        os.close(fd)


def _leave_all() -> None:
    for folder in list(_holds):
        _release(folder)
        if is_own(folder):
            _remove_unheld(folder)


def _remove_unheld(folder: Path) -> bool:
    """Remove the folder when no process holds it. Renamed first: who comes meanwhile makes another."""
    fd = _open_lock(folder)
    if fd is None:
        return True
    try:
        if not _try_lock(fd):
            return False
        if _is_at(fd, folder / _HELD):
            gone = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
            folder.rename(gone)
            for scratch in gone.iterdir():
                remove_scratch(scratch)
            shutil.rmtree(gone, ignore_errors=True)
        return True
    finally:
        os.close(fd)


@contextmanager
def node_lock(run_id: str, *, deadline_s: float, check: Callable[[], None]) -> Iterator[float]:
    """One holder per node and run; yields the seconds waited. The kernel releases it when the process dies.

    On a node-local file, because flock on a shared filesystem may be a no-op. `check` runs between tries and raises to
    give up. Raises WaitTimeoutError.
    """
    started_s = time.monotonic()
    fd = os.open(node_folder(run_id) / "reload.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _try_lock(fd):
            check()
            waited_s = time.monotonic() - started_s
            if waited_s > deadline_s:
                raise WaitTimeoutError("the node's reload lock", "the other instances of this node", waited_s)
            time.sleep(_LOCK_POLL_S)
        yield time.monotonic() - started_s
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
