"""A folder on the node itself, for what a shared filesystem cannot do: sockets and locks."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.files import WaitTimeoutError
from stages.rollout.memory_folder import leave_memory_folder, own_folder

_MAX_SOCKET_FOLDER_LENGTH = 50  # a Unix socket's path has at most 107 characters; vLLM appends up to 37, we up to 20
_LOCK_POLL_S = 0.02


def node_folder(run_id: str) -> Path:
    """The run's own folder on this node, mode 0700, made when missing. Raises ForeignFolderError."""
    return own_folder(_place(run_id))


def _place(run_id: str) -> Path:
    base = Path(tempfile.gettempdir())
    if len(str(base)) > _MAX_SOCKET_FOLDER_LENGTH - 30:
        base = Path("/tmp")
    return base / f"libra-{os.geteuid()}-{run_id}"


def remove_node_folder(run_id: str) -> None:
    """Remove the run's folders with all that killed instances left in them; for when none of them runs here any more."""
    leave_memory_folder(run_id)
    shutil.rmtree(_place(run_id), ignore_errors=True)


def leave_node_folder(run_id: str) -> None:
    """Remove the run's folders when nothing of any instance is in them any more; for the end of an instance."""
    leave_memory_folder(run_id)
    try:
        node_folder(run_id).rmdir()
    except OSError:
        pass  # other instances of this node still use it, or it holds the lock file of the serial strategy


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
