"""vLLM servers and the waits around them."""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import LibraConfig


def cache_size_is_for_cpu(config: LibraConfig) -> Iterator[str]:
    wanted = config.rollout.kv_cache_bytes
    if wanted and config.hardware.device != "cpu":
        yield (
            f"rollout.kv_cache_bytes={wanted:g} is read on hardware.device=cpu only; on GPUs set"
            " rollout.gpu_memory_utilization, and rollout.kv_cache_bytes=0"
        )
    elif 0 < wanted < 1e6:
        yield f"rollout.kv_cache_bytes={wanted:g} is less than 1e6 bytes: 1 GB is 1e9"


def heartbeats_outlast_their_pause(config: LibraConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.heartbeat_timeout_s < 2 * rollout.heartbeat_interval_s:
        yield (
            f"rollout.heartbeat_timeout_s={rollout.heartbeat_timeout_s:g} is less than two pauses of"
            f" rollout.heartbeat_interval_s={rollout.heartbeat_interval_s:g}: healthy instances would count as dead;"
            " raise rollout.heartbeat_timeout_s"
        )


def a_request_ends_before_its_batch(config: LibraConfig) -> Iterator[str]:
    planner, request_s = config.global_resource_planner, config.rollout.request_timeout_s
    batch_s = planner.runtime_batch_collection_timeout_s * (1 + planner.runtime_batch_collection_max_retries)
    if request_s > batch_s:
        yield (
            f"rollout.request_timeout_s={request_s:g} is more than the {batch_s:g} s that a batch may take"
            " (global_resource_planner.runtime_batch_collection_timeout_s and _max_retries): the run would end before a"
            " slow request does; raise global_resource_planner.runtime_batch_collection_timeout_s or lower"
            " rollout.request_timeout_s"
        )


def the_least_pool_is_no_larger_than_the_pool(config: LibraConfig) -> Iterator[str]:
    wanted, gpus = config.rollout.min_instances, config.rollout_gpus
    if config.global_resource_planner.initial_allocation_strategy == "grp":
        gpus += config.train_gpus
    available = gpus // max(1, config.vllm_tp_size)
    if wanted > available:
        yield (
            f"rollout.min_instances={wanted} is more than the {available} instances that {gpus} GPUs make at"
            f" vllm_tp_size={config.vllm_tp_size}; lower rollout.min_instances (0 needs all) or raise rollout_gpus"
        )


RULES = (
    cache_size_is_for_cpu,
    heartbeats_outlast_their_pause,
    a_request_ends_before_its_batch,
    the_least_pool_is_no_larger_than_the_pool,
)
