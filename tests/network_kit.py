"""Who listens where: sockets of a run's processes, read from /proc."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which one of the processes listens; "0.0.0.0" and "::" are all addresses."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    return {place for inode, place in _listeners().items() if inode in inodes}


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def _socket_inodes(pid: int) -> Iterable[str]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
        if match:
            yield match[1]


def _listeners() -> dict[str, tuple[str, int]]:
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTEN:
                found[rest[5]] = _address(local)
    return found


def _address(text: str) -> tuple[str, int]:
    """ "0100007F:1F90" -> ("127.0.0.1", 8080): 32-bit words in the machine's own order."""
    digits, port = text.split(":")
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed), int(port, 16)
