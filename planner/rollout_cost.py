"""Seconds of generating one batch, by named term."""

from __future__ import annotations

import math

from conf.schema import LibraConfig
from planner.architecture import Architecture
from planner.efficiency import Efficiency
from planner.lengths import Lengths
from planner.memory import DTYPE_BYTES, key_value_capacity_tokens


def generate_seconds(config: LibraConfig, arch: Architecture, lengths: Lengths, share: Efficiency) -> dict[str, float]:
    """Terms that follow one another while the instance with the most groups generates its part of a batch.

    Groups stay on one instance, which computes their prompt once (prefix caching). Decoding goes in waves of as many
    trajectories as the instance takes at once; "tail" is what the longest trajectory needs beyond that when it decodes
    alone at the end. Batches that overlap (max_head_offpolicyness) are not counted as a gain.
    """
    groups = math.ceil(math.ceil(config.batch_size / config.n_samples) / instances(config))
    trajectories = min(groups * config.n_samples, config.batch_size)
    decode_s = decode_seconds(config, arch, lengths, share, trajectories)
    alone_s = lengths.longest_new_tokens * step_seconds(
        config, arch, share, 1, lengths.prompt_tokens + lengths.longest_new_tokens / 2
    )
    return {
        "prefill": groups * prefill_seconds(config, arch, lengths.prompt_tokens, share),
        "decode": decode_s,
        "tail": max(0.0, alone_s - decode_s),
    }


def instances(config: LibraConfig) -> int:
    return config.rollout_gpus // config.vllm_tp_size


def at_once(config: LibraConfig, arch: Architecture) -> int:
    """Trajectories that one instance decodes together: as many as its KV cache holds when they end, and as are allowed."""
    fitting = key_value_capacity_tokens(config, arch) // config.max_model_len
    allowed = math.ceil(config.max_concurrent_rollouts / instances(config))
    return max(1, min(config.rollout.max_num_seqs, fitting, allowed))


def decode_seconds(
    config: LibraConfig, arch: Architecture, lengths: Lengths, share: Efficiency, trajectories: int
) -> float:
    """Full waves, and one with the rest; each has as many steps as a trajectory has tokens."""
    most = at_once(config, arch)
    context = lengths.prompt_tokens + lengths.mean_new_tokens / 2
    waves, rest = divmod(trajectories, most)
    seconds = waves * step_seconds(config, arch, share, most, context) if waves else 0.0
    seconds += step_seconds(config, arch, share, rest, context) if rest else 0.0
    return seconds * lengths.mean_new_tokens


def step_seconds(config: LibraConfig, arch: Architecture, share: Efficiency, sequences: int, context: float) -> float:
    """One decode step of `sequences` sequences that have `context` tokens each.

    Each GPU reads its part of the weights once and its part of every sequence's KV cache, or computes for longer than
    that; then two all-reduces in each layer when the instance has several GPUs.
    """
    tp, width, hardware = config.vllm_tp_size, DTYPE_BYTES[config.rollout.dtype], config.hardware
    weights = arch.parameters_read(sequences) / tp * width
    cache = sequences * context * arch.key_value_elements_per_gpu(tp) * width
    read_s = (weights + cache) / (hardware.gpu_memory_bytes_per_s * share.decode_memory)
    flops = sequences * (2.0 * arch.matrix_parameters + 4.0 * arch.layers * arch.query_width * context)
    compute_s = flops / (tp * hardware.gpu_flops * share.prefill_flops)
    eager_s = arch.layers * share.eager_layer_s if config.rollout.enforce_eager else 0.0
    return max(read_s, compute_s) + eager_s + all_reduce_seconds(config, arch, share, sequences)


def all_reduce_seconds(config: LibraConfig, arch: Architecture, share: Efficiency, tokens: float) -> float:
    """The all-reduces of one pass over `tokens` tokens, two in each layer; they ride the link at its full rate, late."""
    tp = config.vllm_tp_size
    if tp == 1:
        return 0.0
    moved = 2 * (tp - 1) / tp * tokens * arch.hidden * DTYPE_BYTES[config.rollout.dtype]
    return arch.layers * 2 * (share.all_reduce_s + moved / config.hardware.link_bytes_per_s)


def prefill_seconds(config: LibraConfig, arch: Architecture, tokens: float, share: Efficiency) -> float:
    """One prompt's pass: 2 FLOPs for each parameter and token, and attention."""
    flops = 2.0 * arch.matrix_parameters * tokens + arch.attention_flops(tokens)
    rate = config.vllm_tp_size * config.hardware.gpu_flops * share.prefill_flops
    return flops / rate + all_reduce_seconds(config, arch, share, tokens)
