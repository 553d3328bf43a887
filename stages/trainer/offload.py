"""megatron-core's optimizer with a part of its state, and of its steps, in host memory (its HybridDeviceOptimizer).

A parameter is offloaded whole: parameters go to the host, in the order of the model, until the wanted fraction of the
elements is there. Gradients travel to pinned memory, a fused AdamW steps them on the processors, and weights travel back,
each copy in a stream of its own. Master weights are offloaded too when the model is bfloat16.

Read in 0.16.1 and in 0.19.2, whose file is the same. What it needs from outside is here; nothing of it concerns runs
without offload.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


@contextmanager
def building() -> Iterator[None]:
    """Around `get_megatron_optimizer`, when part of the state is offloaded.

    - It first makes an optimizer of the whole parameters, only to replace it by one of this rank's shards. The first one
      would copy the whole model into pinned memory, on every rank; `_Placeholder` stands for it.
    - Shards of float32 parameters are views with a history, which the second one refuses; without gradients they have none.
    """
    megatron_optimizer.HybridDeviceOptimizer = _Placeholder
    try:
        with torch.no_grad():
            yield
    finally:
        megatron_optimizer.HybridDeviceOptimizer = HybridDeviceOptimizer


def pin_host_weights(optimizer: Any) -> None:
    """Pin the float32 host copies of bfloat16 weights, which are made unpinned: such copies travel at a tenth of the rate."""
    for inner in optimizer.chained_optimizers:
        for weights in inner.optimizer.cpu_copys_map_gpu_param:
            if not weights.is_pinned():
                weights.data = weights.data.pin_memory()


class _Placeholder(HybridDeviceOptimizer):
    """Holds groups and defaults, and no state."""

    def _init_sub_optimizers(self) -> None:
        self.cpu_optimizers: list[torch.optim.Optimizer] = []
        self.gpu_optimizer = None
