"""Free TCP ports of this machine's loopback interface."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from launch.devcluster.errors import DevClusterError

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 20_000


def free_ports(count: int, rng: random.Random | None = None) -> tuple[int, ...]:
    """`count` different ports that can be bound now, all held together while they are chosen.

    They lie below the kernel's ephemeral range, so that no outgoing connection takes one before the
    daemon binds it. Raises DevClusterError when there are not enough.
    """
    candidates = list(range(LOWEST_PORT, _first_ephemeral_port()))
    (rng or random.Random()).shuffle(candidates)
    chosen: list[int] = []
    with ExitStack() as held:
        for port in candidates:
            if len(chosen) == count:
                break
            listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            if _can_bind(listener, port):
                chosen.append(port)
    if len(chosen) < count:
        raise DevClusterError(f"{count} free ports wanted on 127.0.0.1 from {LOWEST_PORT} up, {len(chosen)} found")
    return tuple(chosen)


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        return _can_bind(listener, port)


def _can_bind(listener: socket.socket, port: int) -> bool:
    # As the daemons do: connections in TIME_WAIT do not count as taken, listeners do.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1)
    except OSError:
        return False
    return True


def _first_ephemeral_port() -> int:
    first = int(EPHEMERAL_RANGE.read_text().split()[0]) if EPHEMERAL_RANGE.exists() else 32_768
    # A machine may have its range start lower; then some overlap is unavoidable.
    return max(first, LOWEST_PORT + 2_000)
