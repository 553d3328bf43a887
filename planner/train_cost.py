"""Seconds of one optimizer step, by named term."""

from __future__ import annotations

import math

from conf.schema import LibraConfig
from planner.architecture import Architecture
from planner.efficiency import Efficiency
from planner.lengths import Lengths
from planner.memory import DTYPE_BYTES, data_parallel, offloaded_share


def train_seconds(config: LibraConfig, arch: Architecture, lengths: Lengths, share: Efficiency) -> dict[str, float]:
    """Terms that follow one another in a step of `batch_size` trajectories; the step takes their sum.

    The replica with the most trajectories decides (the trainer deals them out evenly). Backward is twice the forward pass;
    log-probs are recomputed in one more forward pass. Nothing overlaps: the trainer reduces gradients after the last
    micro-batch.
    """
    sequences = math.ceil(config.batch_size / data_parallel(config))
    forward_s = sequences * forward_seconds(config, arch, lengths.mean_tokens) / share.train_flops
    all_reduce_s = sequences * all_reduce_seconds(config, arch, lengths.mean_tokens) / share.tensor_parallel_link
    recomputed = 1 if config.recompute_logprobs else 0
    return {
        "forward_backward": 3 * forward_s,
        "recompute_logprobs": recomputed * forward_s,
        "tensor_parallel": (2 + recomputed) * all_reduce_s,
        "data_parallel": data_parallel_seconds(config, arch, share),
        **optimizer_seconds(config, arch, share),
    }


def forward_seconds(config: LibraConfig, arch: Architecture, tokens: float) -> float:
    """One trajectory's forward pass at the full rate of its tensor-parallel group: 2 FLOPs for each parameter and token,
    and attention."""
    flops = 2.0 * arch.matrix_parameters * tokens + arch.attention_flops(tokens)
    return flops / (config.train_tp_size * config.hardware.gpu_flops)


def all_reduce_seconds(config: LibraConfig, arch: Architecture, tokens: float) -> float:
    """The all-reduces of one trajectory's forward (or backward) pass at the full rate of the link: two in each layer."""
    tp = config.train_tp_size
    moved = 2 * (tp - 1) / tp * tokens * arch.hidden * DTYPE_BYTES[config.train_dtype]
    return arch.layers * 2 * moved / config.hardware.link_bytes_per_s


def data_parallel_seconds(config: LibraConfig, arch: Architecture, share: Efficiency) -> float:
    """Reduce-scatter of float32 gradients and all-gather of updated parameters, once a step.

    A node's replicas combine over the link first; what is left crosses the network, each GPU carrying a part.
    """
    nodes = math.ceil(config.train_gpus / config.hardware.gpus_per_node)
    in_node = max(1, data_parallel(config) // nodes)
    moved = arch.parameters / config.train_tp_size * (4.0 + DTYPE_BYTES[config.train_dtype])
    inside = moved * (in_node - 1) / in_node / (config.hardware.link_bytes_per_s * share.data_parallel_link)
    between = moved / in_node * (nodes - 1) / nodes / (config.hardware.network_bytes_per_s * share.network)
    return inside + between


def optimizer_seconds(config: LibraConfig, arch: Architecture, share: Efficiency) -> dict[str, float]:
    """Adam reads gradient, master weight and moments, and writes all but the gradient, and the 16-bit weight.

    The offloaded share does the same in host memory, while its gradients come there and its weights go back.
    """
    width = DTYPE_BYTES[config.train_dtype]
    own = arch.parameters / config.train_tp_size / data_parallel(config)
    touched = 28.0 + (width if width < 4 else 0)
    away = offloaded_share(config) * own
    return {
        "optimizer": (own - away) * touched / (config.hardware.gpu_memory_bytes_per_s * share.memory),
        "optimizer_offload": away * max(8.0 / share.host_link_bytes_per_s, 28.0 / share.host_adam_bytes_per_s),
    }


def communication_compute_ratio(config: LibraConfig, arch: Architecture) -> float:
    """Communication over computation of one layer's forward pass, at the hardware's own rates.

    For one micro-batch of trajectories of max_model_len tokens. Tensor parallelism stays inside a node, so its
    all-reduces go over the link.
    """
    tokens = config.max_model_len
    flops = 2.0 * arch.layer_matrix_parameters * tokens + arch.attention_flops(tokens) / arch.layers
    compute_s = config.micro_batch_size * flops / (config.train_tp_size * config.hardware.gpu_flops)
    communicate_s = config.micro_batch_size * all_reduce_seconds(config, arch, tokens) / arch.layers
    return communicate_s / compute_s
