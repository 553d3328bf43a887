"""How both sides are spread over GPUs and nodes, as far as the options alone decide it.

`planner/search.py` tests every layout it considers once more; here all contradictions are found at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import LibraConfig


def whole_replicas(config: LibraConfig) -> Iterator[str]:
    if config.global_resource_planner.initial_allocation_strategy != "configured":
        return
    ranks = max(1, config.train_tp_size * config.train_pp_size * config.train_cp_size)
    if config.train_gpus % ranks:
        yield (
            f"train_gpus={config.train_gpus} is not a multiple of train_tp_size x train_pp_size x train_cp_size = {ranks};"
            " change one of them"
        )


def tensor_parallel_in_a_node(config: LibraConfig) -> Iterator[str]:
    per_node = config.hardware.gpus_per_node
    chosen = config.global_resource_planner.initial_allocation_strategy == "configured"
    if chosen and config.train_tp_size > per_node:
        yield (
            f"train_tp_size={config.train_tp_size} is more than hardware.gpus_per_node={per_node}; tensor parallelism"
            " stays inside a node: lower train_tp_size"
        )
    if config.vllm_tp_size > per_node:
        yield (
            f"vllm_tp_size={config.vllm_tp_size} is more than hardware.gpus_per_node={per_node}; an instance fits on one"
            " node: lower vllm_tp_size"
        )


def whole_instances(config: LibraConfig) -> Iterator[str]:
    if config.global_resource_planner.initial_allocation_strategy != "configured":
        return
    if config.rollout_gpus % max(1, config.vllm_tp_size):
        yield (
            f"rollout_gpus={config.rollout_gpus} is not a multiple of vllm_tp_size={config.vllm_tp_size}: GPUs would stay"
            " idle; change one of them"
        )


def one_process_on_cpu(config: LibraConfig) -> Iterator[str]:
    if config.hardware.device == "cpu" and config.vllm_tp_size > 1:
        yield (
            f"vllm_tp_size={config.vllm_tp_size}: on hardware.device=cpu one instance is one process; set vllm_tp_size=1"
        )


RULES = (whole_replicas, tensor_parallel_in_a_node, whole_instances, one_process_on_cpu)
