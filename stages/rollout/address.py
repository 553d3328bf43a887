"""Where an instance's server listens."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from stages.rollout.errors import RolloutError

LOOPBACK = "127.0.0.1"


class NoAddressError(RolloutError):
    """This node has no address by which other nodes could reach it, or how many nodes there are cannot be told."""


def listen_address(environment: Mapping[str, str] = os.environ) -> str:
    """127.0.0.1 when the run is on one node (no Slurm, or a job of one node), else this node's address.

    A heterogeneous job counts as several nodes: Slurm gives its components different ones. Raises NoAddressError.
    """
    names = ("SLURM_HET_SIZE", "SLURM_JOB_NUM_NODES" if environment.get("SLURM_JOB_NUM_NODES") else "SLURM_NNODES")
    if all(_count(environment, name) == 1 for name in names):
        return LOOPBACK
    return node_address()


def _count(environment: Mapping[str, str], name: str) -> int:
    """1 where it is not set. Guessing would bind a server where its peers, or too many others, reach it."""
    text = environment.get(name) or "1"
    if re.fullmatch("[0-9]{1,10}", text) is None:
        raise NoAddressError(f"{name} of this step is {text[:80]!r}, wanted is a whole number as Slurm sets it")
    return int(text)


def node_address() -> str:
    """The address that the host's name stands for, else that of the interface towards other networks.

    Raises NoAddressError when both are loopback.
    """
    candidates = []
    try:
        candidates = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except socket.gaierror:
        pass  # a host whose own name does not resolve is common in containers; the route below decides
    candidates.append(_address_towards_others())
    for candidate in candidates:
        if candidate and not candidate.startswith("127."):
            return candidate
    raise NoAddressError(f"host {socket.gethostname()} has no address but loopback, and the run has several nodes")


def _address_towards_others() -> str:
    """No packet is sent: connecting a datagram socket only looks up the route. Empty when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # TEST-NET-2, RFC 5737
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def bound_socket(host: str) -> socket.socket:
    """A TCP socket on a free port of `host`, bound but not listening, for the server to inherit.

    Nobody can take the port between its choice and its use: the kernel chose it, and the socket stays open.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, 0))
    return bound
