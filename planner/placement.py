"""Which node holds what. Nodes are never split between components (Slurm does not let components share one)."""

from __future__ import annotations

import math

from conf.schema import LibraConfig
from planner.errors import PlanError
from planner.plan import InstancePlacement, RolloutLayout

MAX_ROLLOUT_COMPONENTS = 8
"""Components of the rollout pool: enough to hand nodes back piece by piece; each one counts as a job against limits."""


def aligned_nodes(gpus: int, gpus_per_node: int, option: str) -> int:
    """Nodes for `gpus`; more than one node must be whole nodes. Raises PlanError."""
    if gpus <= gpus_per_node:
        return 1
    if gpus % gpus_per_node:
        below, above = gpus // gpus_per_node * gpus_per_node, math.ceil(gpus / gpus_per_node) * gpus_per_node
        raise PlanError(
            f"{option}={gpus} does not fill whole nodes of hardware.gpus_per_node={gpus_per_node}; set {option} to {below} or {above}"
        )
    return gpus // gpus_per_node


def place_rollout(config: LibraConfig, *, separate: bool, first_gpu: int = 0) -> RolloutLayout:
    """Instances in order over nodes and components.

    `separate`: the pool has its own nodes in components 1.. ; otherwise everything is component 0 and the pool starts
    behind `first_gpu` GPUs that the trainer holds. Raises PlanError when an instance would cross nodes.
    """
    per_node, tp = config.hardware.gpus_per_node, config.vllm_tp_size
    if tp > per_node:
        raise PlanError(
            f"vllm_tp_size={tp} is more than hardware.gpus_per_node={per_node}; an instance must fit on one node"
        )
    if config.rollout_gpus % tp:
        raise PlanError(
            f"rollout_gpus={config.rollout_gpus} is not a multiple of vllm_tp_size={tp}; change one of them"
        )
    if per_node % tp and config.rollout_gpus > per_node:
        raise PlanError(f"vllm_tp_size={tp} does not divide hardware.gpus_per_node={per_node}; GPUs would stay idle")
    nodes = aligned_nodes(config.rollout_gpus, per_node, "rollout_gpus") if separate else 1
    per_component = math.ceil(nodes / MAX_ROLLOUT_COMPONENTS)
    instances = []
    for index in range(config.rollout_gpus // tp):
        node = (first_gpu + index * tp) // per_node
        component, local = (1 + node // per_component, node % per_component) if separate else (0, node)
        instances.append(InstancePlacement(f"rollout_{index:03d}", tp, component, local))
    if not separate:
        nodes = instances[-1].node + 1
    return RolloutLayout(config.rollout_gpus, nodes, min(config.rollout_gpus, per_node), tuple(instances))
