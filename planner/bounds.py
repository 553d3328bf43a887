"""Times that the hardware cannot beat. Predictions start here and are only ever corrected upwards."""

from __future__ import annotations

import math

from conf.schema import LibraConfig
from planner.architecture import Architecture
from planner.memory import DTYPE_BYTES
from planner.plan import RolloutLayout, TrainLayout


def lower_bounds(
    config: LibraConfig, arch: Architecture, train: TrainLayout, rollout: RolloutLayout
) -> dict[str, float]:
    """Seconds and bytes of one step at best, for trajectories of `max_model_len` tokens.

    train_s: 6 FLOPs for each parameter and token (forward and backward), 2 more when log-probs are recomputed.
    generate_s: each decoded token reads every weight once for the sequences decoded together.
    refresh_s: a node reads every published byte once.
    """
    tokens = config.batch_size * config.max_model_len
    flops_per_token = arch.parameters * (8.0 if config.recompute_logprobs else 6.0)
    weight_bytes = arch.parameters * DTYPE_BYTES[config.weights.dtype]
    at_once = len(rollout.instances) * config.rollout.max_num_seqs
    waves = math.ceil(config.batch_size / at_once)
    per_token_s = (
        arch.parameters
        * DTYPE_BYTES[config.rollout.dtype]
        / config.vllm_tp_size
        / config.hardware.gpu_memory_bytes_per_s
    )
    return {
        "train_s": tokens * flops_per_token / (train.gpus * config.hardware.gpu_flops),
        "generate_s": waves * config.max_new_tokens * per_token_s,
        "refresh_s": weight_bytes / config.hardware.network_bytes_per_s,
        "weight_bytes": float(weight_bytes),
    }
