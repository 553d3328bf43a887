"""One `up` or `down` at a time, without a lock file that would stay behind."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.devcluster.errors import DevClusterError
from launch.devcluster.processes import wait_until


@contextmanager
def exclusive(root: Path, patience_s: float) -> Iterator[tuple[Path, ...]]:
    """Hold the right to make or delete `root`; yields the folders above it that had to be made, innermost first.

    The lock is on the parent folder itself, because `root` comes and goes. `down` may delete the parent as
    well, so the lock counts only while that folder still has its name. Raises DevClusterError when the lock
    stays taken.
    """
    deadline = time.monotonic() + patience_s
    while True:
        created = make_parents(root)
        holder = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not wait_until(lambda: _taken(holder), deadline - time.monotonic()):  # noqa: B023 (used at once)
                raise DevClusterError(f"another `launch.devcluster` has been at work in {root} for {patience_s:.0f} s")
            if _still_named(holder, root.parent):
                yield created
                return
        finally:
            os.close(holder)


def make_parents(root: Path) -> tuple[Path, ...]:
    """Create the folders above `root`; returns those that were new, innermost first."""
    new = []
    for parent in root.parents:
        if parent.exists():
            break
        new.append(parent)
    root.parent.mkdir(parents=True, exist_ok=True)
    return tuple(new)


def remove_parents(created: tuple[Path, ...]) -> None:
    """Undo make_parents, as far as nobody else has put something there by now."""
    for parent in created:
        try:
            parent.rmdir()
        except OSError:
            return


def _taken(holder: int) -> bool:
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still_named(holder: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(holder), folder.stat())
    except FileNotFoundError:
        return False
