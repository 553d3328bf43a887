"""One `up` or `down` at a time, without a lock file that would stay behind."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.devcluster.errors import DevClusterError
from launch.devcluster.processes import wait_until


@contextmanager
def exclusive(folder: Path, patience_s: float) -> Iterator[None]:
    """Hold the lock of an existing `folder` itself; raises DevClusterError when it stays taken.

    The cluster's own folder comes and goes, so its parent is what gets locked.
    """
    holder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not wait_until(lambda: _taken(holder), patience_s):
            raise DevClusterError(f"another `launch.devcluster` has been working in {folder} for {patience_s:.0f} s")
        yield
    finally:
        os.close(holder)


def _taken(holder: int) -> bool:
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
