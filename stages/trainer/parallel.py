"""The trainer's ranks: process groups, and this rank's place in the grid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from conf.schema import LibraConfig
from stages.context import StageContext, StoppedError
from stages.trainer.gather import gather_bytes
from stages.trainer.meeting import meeting
from stages.weights.patience import replacements_s

EXTRA_TIMEOUT_S = 60.0
BATCH_SLACK = 1.1


class LayoutError(ValueError):
    """The number of started ranks is not the product of the parallel sizes."""


@dataclass(frozen=True)
class RankGrid:
    """This rank's coordinates. Tensor-parallel ranks are neighbours: rank = dp_rank * tp + tp_rank (pp = cp = 1).

    `bytes_group` and `refresh_group` are gloo groups of all ranks: one for the thread that trains, one for what goes on beside
    it (`stages.trainer.refresher`).
    """

    rank: int
    world_size: int
    tp: int
    tp_rank: int
    dp: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    bytes_group: dist.ProcessGroup
    refresh_group: dist.ProcessGroup
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
    """All trainer ranks, for `stages.weights` (its RankGroup); over `group`, by default that of the thread that trains."""

    grid: RankGrid
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return self.grid.rank

    @property
    def size(self) -> int:
        return self.grid.world_size

    def gather(self, data: bytes) -> list[bytes]:
        return gather_bytes(data, self.group or self.grid.bytes_group)


@contextmanager
def connected(context: StageContext, *, tp: int) -> Iterator[RankGrid]:
    """Join the other trainer ranks; leave their groups when all of them end or stop. Raises LayoutError and as `meeting`."""
    if context.world_size % tp:
        raise LayoutError(f"{context.world_size} trainer ranks cannot be split by train_tp_size {tp}")
    device = _device(context)
    timeout = timedelta(seconds=collective_timeout_s(context))
    with meeting(context) as store:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
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


def collective_timeout_s(context: StageContext) -> float:
    """Longer than any wait in which one rank may keep the others: for the instances' ACKs, and for a batch meanwhile."""
    longest_s = max(
        batch_timeout_s(context.config, step=0), batch_timeout_s(context.config, step=1) + refresh_timeout_s(context)
    )
    return longest_s + EXTRA_TIMEOUT_S


def refresh_timeout_s(context: StageContext) -> float:
    """How long the instances may take to serve a version, with all replacements of one."""
    config, instances = context.config, len(context.plan.rollout.instances)
    restarts = config.rollout_weight_reload_method == "restart"
    starts = 1 + (instances if restarts and config.rollout_weight_reload_strategy == "serial" else int(restarts))
    start_s = config.rollout.ready_timeout_s + config.rollout.stop_timeout_s
    return config.weights.refresh_timeout_s + starts * start_s + replacements_s(config)


def batch_timeout_s(config: LibraConfig, step: int) -> float:
    """How long batch `step` may take, with all retries of the controller.

    A little more than the controller allows itself: it can say what hangs. Before the first batch it evaluates: greedy
    answers, then samples. Its clock stands while the instances that it has are being replaced.
    """
    planner = config.global_resource_planner
    collection_s = planner.runtime_batch_collection_timeout_s * (1 + planner.runtime_batch_collection_max_retries)
    evaluation_s = 2 * config.rollout.request_timeout_s if config.launch.evaluate and step == 0 else 0.0
    return collection_s * BATCH_SLACK + evaluation_s + replacements_s(config)


def _grid(context: StageContext, tp: int, device: torch.device, timeout: timedelta) -> RankGrid:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=ceil(timeout.total_seconds() / 60),
    )
    bytes_group: Any = dist.group.WORLD if device.type == "cpu" else dist.new_group(backend="gloo", timeout=timeout)
    refresh_group: Any = dist.new_group(backend="gloo", timeout=timeout)
    return RankGrid(
        rank=context.rank,
        world_size=context.world_size,
        tp=tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        dp=context.world_size // tp,
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        bytes_group=bytes_group,
        refresh_group=refresh_group,
        device=device,
    )
