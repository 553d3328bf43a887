"""Bytes on one GPU, by named term, for training and for generation."""

from __future__ import annotations

import math

from conf.schema import LibraConfig
from planner.architecture import Architecture

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

FRAGMENTATION = 0.08
"""Share of GPU memory lost to the allocator's fragmentation (the reference planner's `train_mem_frag_rate`)."""


def trainer_bytes(config: LibraConfig, arch: Architecture, *, tp: int, dp: int, micro_batch: int) -> dict[str, float]:
    """Terms of one training rank, in bytes, plus "total" and "budget".

    Weights and gradients are split over TP. The distributed optimizer splits its state over DP too: float32 moments, and
    a float32 master copy where weights are bf16. Activations assume selective work kept for one micro-batch of
    `max_model_len` tokens: about 34 bytes for each hidden element and token in 16-bit with fused attention (Korthikanti et
    al. 2022, section 4, without the attention-score term), split over TP except the 10 that tensor parallelism leaves whole.
    """
    width = DTYPE_BYTES[config.train_dtype]
    share = arch.parameters / tp
    tokens = micro_batch * config.max_model_len
    per_token = arch.hidden * (10 + 24 / tp) * width / 2
    terms = {
        "weights": share * width,
        "gradients": share * 4.0,
        "optimizer": share / dp * (8.0 if config.train_dtype == "float32" else 12.0),
        "activations": tokens * per_token * arch.layers,
        "recompute_logits": recompute_logits_bytes(config, arch, tp=tp, micro_batch=micro_batch),
    }
    terms["total"] = sum(terms.values())
    terms["budget"] = trainer_budget_bytes(config)
    return terms


def recompute_logits_bytes(config: LibraConfig, arch: Architecture, *, tp: int, micro_batch: int) -> float:
    """Temporary memory of the recompute-logprobs pass, by the reference system's formula (its memory budget)."""
    planner = config.global_resource_planner
    if not (planner.memory_budget_check_enabled and config.recompute_logprobs):
        return 0.0
    batch = max(1, min(micro_batch, config.recompute_micro_batch_size))
    logits = (
        batch * max(1, config.max_model_len - 1) * math.ceil(arch.vocab / tp) * planner.memory_budget_logits_dtype_bytes
    )
    return math.floor(logits * planner.memory_budget_workspace_factor)


def trainer_budget_bytes(config: LibraConfig) -> float:
    margin = config.global_resource_planner.memory_budget_safety_margin_bytes
    return config.hardware.gpu_memory_bytes * (1 - FRAGMENTATION) - margin


def rollout_bytes(config: LibraConfig, arch: Architecture, *, tp: int) -> dict[str, float]:
    """Terms of one vLLM rank: weights, KV cache of a single longest sequence (the least it needs), sampler workspace."""
    width = DTYPE_BYTES[config.rollout.dtype]
    terms = {
        "weights": arch.parameters / tp * width,
        "kv_cache_one_sequence": arch.key_value_elements_per_token * width * config.max_model_len / tp,
        "sampler": min(config.rollout.max_num_seqs, config.max_concurrent_rollouts) * arch.vocab * 4.0,
    }
    terms["total"] = sum(terms.values())
    terms["budget"] = config.hardware.gpu_memory_bytes * config.rollout.gpu_memory_utilization
    return terms
