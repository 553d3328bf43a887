"""`python -m launch.doctor.inside.collective FOLDER BACKEND RANKS PER_NODE [RANK]`: an all-reduce, timed and checked.

Ranks meet as the trainer's do: rank 0 serves a store on a port of the kernel's choice, under its host name.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from launch.doctor.order import Order, read_order
from launch.doctor.probes.collective import NETWORK, NODE
from launch.job_environment import JobEnvironment
from stages.files import make_directory, read_json, wait_for, write_json_atomic
from stages.rollout.address import node_address

LOOPBACK = "127.0.0.1"
BYTES = {"nccl": 256 << 20, "gloo": 8 << 20}
ROUNDS = 5
WARM_UP = 2
FLOAT_BYTES = 4


class WrongSumError(RuntimeError):
    """The all-reduce gave something else than the sum."""


@dataclass(frozen=True)
class Ring:
    """All ranks; those of a node are consecutive."""

    backend: str
    rank: int
    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node

    @property
    def device(self) -> torch.device:
        if self.backend != "nccl":
            return torch.device("cpu")
        return torch.device("cuda", (self.rank % self.per_node) % torch.cuda.device_count())

    def members(self) -> dict[str, list[list[int]]]:
        """Rank lists: the ranks of each node; and across nodes, those of equal place. Kinds of one rank are left out."""
        nodes = [[node * self.per_node + place for place in range(self.per_node)] for node in range(self.nodes)]
        across = [[node * self.per_node + place for node in range(self.nodes)] for place in range(self.per_node)]
        kinds = {NODE: nodes, NETWORK: across}
        return {kind: lists for kind, lists in kinds.items() if len(lists[0]) > 1}


def main(words: Sequence[str]) -> int:
    folder, backend, ranks, per_node, *own = words
    order = read_order(Path(folder))
    rank = int(own[0]) if own else JobEnvironment(os.environ).count("SLURM_PROCID", 0)
    ring = Ring(backend, rank, int(ranks), int(per_node))
    report: dict[str, Any] = {"backend": backend, "ranks": ring.ranks, "bytes": BYTES[backend], "bus_bytes_per_s": {}}
    try:
        report["bus_bytes_per_s"] = _measure(order, ring)
    except (RuntimeError, OSError, ValueError) as error:
        report["error"] = f"rank {rank}: {' '.join(str(error).split())[:400]}"
        print(report["error"], file=sys.stderr, flush=True)
        if rank == 0:
            _write(order, report)
        return 1
    if rank == 0:
        _write(order, report)
    return 0


def _write(order: Order, report: dict[str, Any]) -> None:
    write_json_atomic(make_directory(order.reports) / "collective.json", report)


def _measure(order: Order, ring: Ring) -> dict[str, float]:
    if ring.backend == "nccl":
        torch.cuda.set_device(ring.device)
    elif ring.nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=order.limits.program_s / 2)
    store = _meet(order, ring, timeout)
    dist.init_process_group(ring.backend, store=store, rank=ring.rank, world_size=ring.ranks, timeout=timeout)
    try:
        return {kind: _bus_rate(ring, kind, lists) for kind, lists in ring.members().items()}
    finally:
        dist.destroy_process_group()


def _meet(order: Order, ring: Ring, timeout: timedelta) -> TCPStore:
    path = order.path / "rendezvous.json"
    if ring.rank == 0:
        host = LOOPBACK if ring.nodes == 1 else node_address()
        listener = socket.create_server((host, 0), backlog=ring.ranks)
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            ring.ranks,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        write_json_atomic(path, {"host": host, "port": port})
        return store
    place = wait_for(
        lambda: read_json(path), deadline_s=timeout.total_seconds(), awaited="the meeting place", from_whom="rank 0"
    )
    return TCPStore(place["host"], place["port"], ring.ranks, is_master=False, timeout=timeout)


def _bus_rate(ring: Ring, kind: str, lists: list[list[int]]) -> float:
    """Bytes per second over the busiest link, by the slowest rank: 2 (n - 1) / n of the buffer (nccl-tests' "busbw").

    All groups of the kind work at the same time, as they do in training.
    """
    groups = [(members, dist.new_group(members)) for members in lists]
    members, group = next((members, group) for members, group in groups if ring.rank in members)
    buffer = torch.empty(BYTES[ring.backend] // FLOAT_BYTES, device=ring.device)
    wait: Callable[[], None] = torch.cuda.synchronize if ring.backend == "nccl" else lambda: None
    took = [_once(buffer, members, group, ring.rank, wait) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    slowest = torch.tensor([min(took)], dtype=torch.float64, device=ring.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    size = len(members)
    return 2 * (size - 1) / size * BYTES[ring.backend] / float(slowest.item())


def _once(buffer: torch.Tensor, members: list[int], group: Any, rank: int, wait: Callable[[], None]) -> float:
    """Seconds of one all-reduce. Raises WrongSumError."""
    buffer.fill_(rank + 1)
    wait()
    dist.barrier(group=group)
    wait()
    started_s = time.monotonic()
    dist.all_reduce(buffer, group=group)
    wait()
    took_s = time.monotonic() - started_s
    wanted = float(sum(member + 1 for member in members))
    if not bool((buffer == wanted).all()):
        raise WrongSumError(f"an all-reduce over ranks {members} gave {float(buffer[0])}, wanted {wanted} everywhere")
    return took_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
