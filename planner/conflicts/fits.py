"""Options that contradict the model they are for; its sizes come from model_path/config.json or the model group."""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import LibraConfig
from planner.architecture import Architecture
from planner.memory import DTYPE_BYTES

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM 0.32's attention for processors can do (`vllm/v1/attention/backends/cpu_attn.py`)."""


def context_within_positions(config: LibraConfig, arch: Architecture) -> Iterator[str]:
    if arch.max_positions and config.max_model_len > arch.max_positions:
        yield (
            f"max_model_len={config.max_model_len} is more than the model's max_position_embeddings={arch.max_positions};"
            " lower max_model_len, or choose a model made for longer contexts"
        )


def attention_on_cpu(config: LibraConfig, arch: Architecture) -> Iterator[str]:
    if config.hardware.device == "cpu" and arch.head_dim not in CPU_HEAD_DIMS:
        yield (
            f"model.head_dim={arch.head_dim}: vLLM's attention on hardware.device=cpu takes"
            f" {', '.join(map(str, CPU_HEAD_DIMS))}; choose another model"
        )


def one_sequence_in_the_cache(config: LibraConfig, arch: Architecture) -> Iterator[str]:
    available = config.rollout.kv_cache_bytes
    width = DTYPE_BYTES.get(config.rollout.dtype, 4)
    wanted = arch.key_value_elements_per_token * width * config.max_model_len
    if config.hardware.device == "cpu" and 0 < available < wanted:
        yield (
            f"rollout.kv_cache_bytes={available:g} does not hold one sequence of max_model_len={config.max_model_len}"
            f" tokens, which takes {wanted:g} bytes; raise rollout.kv_cache_bytes or lower max_model_len"
        )


def a_request_can_finish(config: LibraConfig, arch: Architecture) -> Iterator[str]:
    """Decoding a token reads every weight that it uses from memory once; no engine is faster than that."""
    read_bytes = arch.active_parameters * DTYPE_BYTES.get(config.rollout.dtype, 4) / max(1, config.vllm_tp_size)
    least_s = config.max_new_tokens * read_bytes / config.hardware.gpu_memory_bytes_per_s
    if least_s > config.rollout.request_timeout_s:
        yield (
            f"rollout.request_timeout_s={config.rollout.request_timeout_s:g}: max_new_tokens={config.max_new_tokens} take at"
            f" least {least_s:.0f} s, for reading the weights alone; raise rollout.request_timeout_s or lower max_new_tokens"
        )


def experts_divide(config: LibraConfig, arch: Architecture) -> Iterator[str]:
    name, sizes = "global_resource_planner.allowed_train_ep", config.global_resource_planner.allowed_train_ep
    if not arch.num_experts:
        if any(size != 1 for size in sizes):
            yield f"{name}={sizes}: {arch.name} has no experts to spread; set {name} to [] or [1]"
        return
    uneven = [size for size in sizes if arch.num_experts % max(1, size)]
    if uneven:
        yield (
            f"{name} holds {uneven}, which do not divide the model's {arch.num_experts} experts; take them out of {name}"
        )


RULES = (
    context_within_positions,
    attention_on_cpu,
    one_sequence_in_the_cache,
    a_request_can_finish,
    experts_divide,
)
