"""Bytes on one GPU, by named term, for training and for generation; and what training keeps in a node's host memory."""

from __future__ import annotations

import math

from conf.schema import LibraConfig
from planner.architecture import Architecture

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

FRAGMENTATION = 0.08
"""Share of GPU memory lost to the allocator's fragmentation (the reference planner's `train_mem_frag_rate`)."""

HOST_BYTES_PER_OFFLOADED_PARAMETER = 4.0 + 8.0 + 4.0
"""In float32 for the host's Adam: the weight, two moments, and the gradient that came over (megatron-core 0.16.1,
HybridDeviceOptimizer: `gpu_params_map_cpu_copy`, `cpu_copy_map_grad`)."""

HEAD_CHUNK_BYTES = 256 * 2**20
"""Most float32 logits at a time in the trainer's head (`stages.trainer.head.CHUNK_BYTES`, which imports torch)."""


def data_parallel(config: LibraConfig) -> int:
    """Replicas of the policy among the trainer's ranks, rounded down."""
    return config.train_gpus // (config.train_tp_size * config.train_pp_size * config.train_cp_size)


def offloaded_share(config: LibraConfig) -> float:
    return config.megatron_optimizer_offload_fraction if config.megatron_optimizer_cpu_offload else 0.0


def trainer_bytes(config: LibraConfig, arch: Architecture) -> dict[str, float]:
    """Terms of one training rank, in bytes, plus "total" and "budget".

    Weights and gradients are split over TP. The distributed optimizer splits its state over DP too: float32 moments, and a
    float32 master copy where weights are bf16. Offloading takes a share of both away (`stages.trainer.offload`).
    """
    tp, width = config.train_tp_size, DTYPE_BYTES[config.train_dtype]
    share = arch.parameters / tp
    own = share / max(1, data_parallel(config))
    tokens = config.micro_batch_size * config.max_model_len
    terms = {
        "weights": share * width,
        "gradients": share * 4.0,
        "optimizer": own * (8.0 if width == 4 else 12.0) * (1 - offloaded_share(config)),
        "activations": tokens * activation_bytes_per_token(arch, tp=tp, width=width),
        "head": head_bytes(arch, tokens=tokens, tp=tp, width=width),
        "recompute_logits": recompute_logits_bytes(config, arch),
    }
    terms["total"] = sum(terms.values())
    terms["budget"] = trainer_budget_bytes(config)
    return terms


def activation_bytes_per_token(arch: Architecture, *, tp: int, width: int) -> float:
    """What the forward pass keeps of one token for the backward pass, and one more layer as working set.

    Counted as in Korthikanti et al. 2022, section 4.1, for this trainer, which recomputes nothing and keeps no scores.
    Whole on every rank, as there is no sequence parallelism: inputs and outputs of the two norms, and the one-byte masks
    that megatron-core's dropout keeps even at probability 0. Split over TP: the fused q, k, v, the rotated q and k, the
    attention's output and its copy in the order of the next product; of the gated MLP the two halves, the activated gate
    and the product. A token's copies for each expert that it visits are whole too.
    """
    whole = 4 * arch.hidden * width + 2 * arch.hidden
    attention = 4 * arch.query_width + 3 * arch.key_value_width
    mlp = 4 * (arch.experts_per_token * arch.moe_intermediate_size if arch.is_moe else arch.intermediate)
    if arch.is_moe:
        whole += (2 * arch.experts_per_token * arch.hidden + arch.num_experts) * width
    return (arch.layers + 1) * (whole + (attention + mlp) * width / tp)


def head_bytes(arch: Architecture, *, tokens: int, tp: int, width: int) -> float:
    """Working set of the head in the backward pass: its gradient in float32 and twice in the weights' format, and a chunk
    of logits in both (`stages.trainer.head`)."""
    rows = math.ceil(arch.vocab / tp)
    chunk = min(HEAD_CHUNK_BYTES, tokens * rows * 4)
    return rows * arch.hidden * (4.0 + 2 * width) + chunk * (1 + width / 4)


def recompute_logits_bytes(config: LibraConfig, arch: Architecture) -> float:
    """Temporary memory of the recompute-logprobs pass, by the reference system's formula (its memory budget)."""
    planner = config.global_resource_planner
    if not (planner.memory_budget_check_enabled and config.recompute_logprobs):
        return 0.0
    batch = max(1, min(config.micro_batch_size, config.recompute_micro_batch_size))
    rows = math.ceil(arch.vocab / config.train_tp_size)
    logits = batch * max(1, config.max_model_len - 1) * rows * planner.memory_budget_logits_dtype_bytes
    return math.floor(logits * planner.memory_budget_workspace_factor)


def trainer_budget_bytes(config: LibraConfig) -> float:
    margin = config.global_resource_planner.memory_budget_safety_margin_bytes
    return config.hardware.gpu_memory_bytes * (1 - FRAGMENTATION) - margin


def host_bytes(config: LibraConfig, arch: Architecture) -> dict[str, float]:
    """Host memory that the offloaded optimizer state takes on one trainer node; empty when nothing is offloaded.

    "budget" is there when slurm.mem_per_node_bytes says what the node gives.
    """
    if not offloaded_share(config):
        return {}
    ranks = min(config.train_gpus, config.hardware.gpus_per_node)
    own = arch.parameters / config.train_tp_size / max(1, data_parallel(config))
    offloaded = ranks * own * offloaded_share(config) * HOST_BYTES_PER_OFFLOADED_PARAMETER
    terms = {"host_optimizer": offloaded, "total": offloaded}
    if config.slurm.mem_per_node_bytes:
        terms["budget"] = config.slurm.mem_per_node_bytes
    return terms


def rollout_bytes(config: LibraConfig, arch: Architecture) -> dict[str, float]:
    """Terms of one vLLM rank: weights, KV cache of a single longest sequence (the least it needs), sampler workspace."""
    width, tp = DTYPE_BYTES[config.rollout.dtype], config.vllm_tp_size
    terms = {
        "weights": arch.parameters / tp * width,
        "kv_cache_one_sequence": float(arch.key_value_elements_per_gpu(tp) * width * config.max_model_len),
        "sampler": min(config.rollout.max_num_seqs, config.max_concurrent_rollouts) * arch.vocab * 4.0,
    }
    terms["total"] = sum(terms.values())
    terms["budget"] = config.hardware.gpu_memory_bytes * config.rollout.gpu_memory_utilization
    return terms


def key_value_capacity_tokens(config: LibraConfig, arch: Architecture) -> int:
    """Tokens whose KV cache one instance holds: what its budget leaves on each of its GPUs.

    On CPU `rollout.kv_cache_bytes` is the whole cache when it is set, as the server is told.
    """
    width, tp = DTYPE_BYTES[config.rollout.dtype], config.vllm_tp_size
    terms = rollout_bytes(config, arch)
    free = terms["budget"] - terms["weights"] - terms["sampler"]
    if config.hardware.device == "cpu" and config.rollout.kv_cache_bytes:
        free = config.rollout.kv_cache_bytes
    return max(0, int(free // (arch.key_value_elements_per_gpu(tp) * width)))
