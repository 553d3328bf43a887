"""Shared memory of an engine outlives its processes when they are killed: vLLM's tensor-parallel workers on CPU leave 8 MB each time.

The names are the engine's own. So they are noted beside the server's sockets while it runs, and whoever removes that folder removes
them: the instance itself, its replacement, the run's end, or the next run on the node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
NOTE = "shared_memory"


def note_shared_memory(scratch: Path, pids: Iterable[int]) -> None:
    """Write the segments that `pids` have mapped to a file in `scratch`, one "inode path" a line."""
    paths = {path for pid in pids for path in _mapped(pid)}
    lines = [f"{path.stat().st_ino} {path}\n" for path in sorted(paths) if path.exists()]
    (scratch / NOTE).write_text("".join(lines), encoding="utf-8")


def remove_shared_memory(scratch: Path) -> None:
    """Remove what is noted in `scratch`, where it is still the same file, ours, and mapped by nobody."""
    try:
        lines = (scratch / NOTE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    noted = {Path(path): int(inode) for inode, _, path in (line.partition(" ") for line in lines)}
    there = {path for path, inode in noted.items() if _is_same(path, inode)}
    if there:
        for path in there.difference(*map(_mapped, _pids())):
            path.unlink(missing_ok=True)


def _is_same(path: Path, inode: int) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return path.is_relative_to(SHARED_MEMORY) and status.st_ino == inode and status.st_uid == os.geteuid()


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _mapped(pid: int) -> set[Path]:
    """Segments in the memory of `pid`; empty when it is gone or not ours."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    names = {line.split(maxsplit=5)[-1] for line in lines if f" {SHARED_MEMORY}/" in line}
    return {Path(name) for name in names if not name.endswith(" (deleted)")}
