"""A run's files belong to its owner alone: they hold a token, pickled callables that the run executes, and people's data."""

from __future__ import annotations

import os
import stat
from pathlib import Path

PRIVATE = 0o700


def make_private(folder: Path) -> str:
    """Give `folder` mode 0700; why that is impossible (another user's, a filesystem that keeps no modes), else ""."""
    try:
        folder.chmod(PRIVATE)
    except PermissionError:
        return _described(folder)
    status = folder.stat()
    is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return "" if is_private else _described(folder)


def writable_by_others(folder: Path) -> str:
    """Why another user could put files into `folder`, else "". A missing one is nobody's."""
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError:
        return ""
    return (
        f"{_described(folder)}; look what others may have put there, then: chmod go-w {folder}" if mode & 0o022 else ""
    )


def _described(folder: Path) -> str:
    status = folder.stat()
    return (
        f"{folder} belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}, wanted user"
        f" {os.geteuid()} and {PRIVATE:04o}: others could read the run's token or replace what it runs"
    )
