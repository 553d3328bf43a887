"""The trainer's ranks: meeting through the run directory, process groups, and this rank's place in the grid."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from conf.schema import LibraConfig
from stages.context import StageContext, StoppedError
from stages.files import wait_for

LOOPBACK = "127.0.0.1"
RENDEZVOUS_TIMEOUT_S = 300.0
EXTRA_TIMEOUT_S = 60.0
BATCH_SLACK = 1.1


class LayoutError(ValueError):
    """The number of started ranks is not the product of the parallel sizes."""


@dataclass(frozen=True)
class RankGrid:
    """This rank's coordinates. Tensor-parallel ranks are neighbours: rank = dp_rank * tp + tp_rank (pp = cp = 1)."""

    rank: int
    world_size: int
    tp: int
    tp_rank: int
    dp: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    objects_group: dist.ProcessGroup
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def optimizer_calls(self) -> AbstractContextManager[None]:
        """Wrap whatever builds or steps megatron-core's optimizer: it names CUDA devices and types outright."""
        if self.device.type == "cuda":
            return nullcontext()
        from stages.trainer import cpu_shim

        return cpu_shim.cuda_names()

    def synchronize(self) -> None:
        """Wait for this rank's GPU, so that a measured phase contains the work that it started."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def highest(self, number: int) -> int:
        """The largest of all ranks' numbers, on every rank; collective over all ranks."""
        value = torch.tensor([number], dtype=torch.int32, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value.item())


@dataclass(frozen=True)
class TrainerRanks:
    """All trainer ranks, for `stages.weights` (its RankGroup)."""

    grid: RankGrid

    @property
    def rank(self) -> int:
        return self.grid.rank

    @property
    def size(self) -> int:
        return self.grid.world_size

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.grid.objects_group)
        return gathered


@contextmanager
def connected(context: StageContext, *, tp: int) -> Iterator[RankGrid]:
    """Join the other trainer ranks; leave their groups when all of them end or stop. Raises LayoutError, WaitTimeoutError."""
    if context.world_size % tp:
        raise LayoutError(f"{context.world_size} trainer ranks cannot be split by train_tp_size {tp}")
    device = _device(context)
    timeout = timedelta(seconds=_collective_timeout_s(context))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=_meet(context),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
    )
    try:
        yield _grid(context, tp, device, timeout)
    except StoppedError:
        _disconnect()
        raise
    # No farewell after a failure: it would wait for ranks that may be stuck in a collective. The process just ends.
    _disconnect()


def _disconnect() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _device(context: StageContext) -> torch.device:
    """The GPU of this rank (Slurm may show a task only its own), or the CPU with megatron-core's CUDA calls redirected."""
    if context.plan.device == "cuda":
        device = torch.device("cuda", context.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    from stages.trainer import cpu_shim

    cpu_shim.install()
    return torch.device("cpu")


def _collective_timeout_s(context: StageContext) -> float:
    """Longer than any wait in which one rank may keep the others: for a batch, or for the instances' ACKs."""
    config, instances = context.config, len(context.plan.rollout.instances)
    restarts = config.rollout_weight_reload_method == "restart"
    starts = 1 + (instances if restarts and config.rollout_weight_reload_strategy == "serial" else int(restarts))
    start_s = config.rollout.ready_timeout_s + config.rollout.stop_timeout_s
    longest_s = max(
        batch_timeout_s(config, step=0),
        batch_timeout_s(config, step=1),
        config.weights.refresh_timeout_s + starts * start_s,
    )
    return longest_s + EXTRA_TIMEOUT_S


def batch_timeout_s(config: LibraConfig, step: int) -> float:
    """How long batch `step` may take, with all retries of the controller.

    A little more than the controller allows itself: it can say what hangs. Before the first batch it evaluates: greedy
    answers, then samples.
    """
    planner = config.global_resource_planner
    collection_s = planner.runtime_batch_collection_timeout_s * (1 + planner.runtime_batch_collection_max_retries)
    evaluation_s = 2 * config.rollout.request_timeout_s if config.launch.evaluate and step == 0 else 0.0
    return collection_s * BATCH_SLACK + evaluation_s


def _grid(context: StageContext, tp: int, device: torch.device, timeout: timedelta) -> RankGrid:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=ceil(timeout.total_seconds() / 60),
    )
    objects_group: Any = dist.group.WORLD if device.type == "cpu" else dist.new_group(backend="gloo", timeout=timeout)
    return RankGrid(
        rank=context.rank,
        world_size=context.world_size,
        tp=tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        dp=context.world_size // tp,
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        objects_group=objects_group,
        device=device,
    )


def _meet(context: StageContext) -> Store:
    """A store that all ranks share. Rank 0 serves it and says where in attempts/N/rendezvous.json; alone, no port is opened."""
    if context.world_size == 1:
        return HashStore()
    path = context.run.attempt_dir / "rendezvous.json"
    timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    one_host = context.plan.train.nodes == 1
    if one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if context.rank == 0:
        host = LOOPBACK if one_host else socket.getfqdn()
        listener = socket.create_server((LOOPBACK if one_host else "", 0), backlog=context.world_size)
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            context.world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        context.run.write(path, {"host": host, "port": port, "world_size": context.world_size})
        return store
    record = wait_for(
        lambda: context.run.read(path),
        deadline_s=RENDEZVOUS_TIMEOUT_S,
        awaited=str(path),
        from_whom="trainer rank 0",
        check=context.check_stop,
    )
    return TCPStore(record["host"], record["port"], context.world_size, is_master=False, timeout=timeout)
