"""Which node holds what. Nodes are never split between components (Slurm does not let components share one).

What the launcher can start is decided here, for a plan that was asked for and for each that the planner tries.
"""

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


def choose_layout(config: LibraConfig) -> tuple[str, str]:
    """("hetjob" | "single", why). A local run shares this one machine, so it is planned as a single job."""
    if config.launch.mode == "local":
        return "single", "launch.mode=local: both sides share this machine"
    if config.launch.mode == "allocation":
        reason = "the job that was allocated has one component" if config.slurm.layout == "single" else "it has several"
        return config.slurm.layout, f"launch.mode=allocation: {reason}"
    if config.slurm.layout == "single":
        return "single", "slurm.layout=single: one job with exact steps; it survives the loss of a rollout node"
    return (
        "hetjob",
        "slurm.layout=hetjob: trainer and rollout need different shapes, and rollout components can be handed back",
    )


def check_launchable(config: LibraConfig, *, separate: bool) -> int:
    """Nodes of the trainer, when `train_gpus` and `rollout_gpus` can be started as they are. Raises PlanError."""
    if not separate:
        check_shared_nodes(config)
    nodes = aligned_nodes(config.train_gpus, config.hardware.gpus_per_node, "train_gpus")
    check_instances(config, separate=separate)
    check_processors(config, separate=separate)
    return nodes


def check_shared_nodes(config: LibraConfig) -> None:
    """A local run has one node; a single job on several nodes fills all of them. What was allocated may stay idle in part."""
    per_node, total = config.hardware.gpus_per_node, config.train_gpus + config.rollout_gpus
    if total <= per_node:
        return
    if config.launch.mode == "local":
        raise PlanError(
            f"train_gpus={config.train_gpus} + rollout_gpus={config.rollout_gpus} = {total} do not fit on this machine:"
            f" hardware.gpus_per_node={per_node}; lower one of them or use a Slurm cluster (cluster=slurm)"
        )
    tp = config.vllm_tp_size
    # Where instances lie in their nodes repeats after one for each GPU of a node.
    starts = range(config.train_gpus, min(total - tp + 1, config.train_gpus + per_node * tp), tp)
    if tp <= per_node and any(first % per_node + tp > per_node for first in starts):
        raise PlanError(
            f"train_gpus={config.train_gpus} and vllm_tp_size={tp}: behind the trainer an instance would cross nodes of"
            f" hardware.gpus_per_node={per_node}; change one of them"
        )
    if config.launch.mode != "allocation" and total % per_node:
        raise PlanError(
            f"slurm.layout=single needs train_gpus + rollout_gpus = {total} to fill whole nodes of hardware.gpus_per_node={per_node}"
        )


def check_instances(config: LibraConfig, *, separate: bool) -> None:
    """The pool is whole instances, none of which crosses nodes. Raises PlanError."""
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
    if separate:
        component_sizes(config, aligned_nodes(config.rollout_gpus, per_node, "rollout_gpus"))


def whole_cores(config: LibraConfig, processors: int) -> int:
    """`processors` rounded up to whole cores.

    Where a core has several hardware threads, Slurm gives all of them to one task: eight tasks of 11 processors take 48
    cores of two threads, and a controller step of one processor never starts beside them (tried on 22.05).
    """
    threads = config.hardware.threads_per_core
    return math.ceil(processors / threads) * threads


def slot_cpus(config: LibraConfig) -> int:
    """Processors that go with one GPU (or one CPU worker slot): whole cores."""
    return _at_least_a_core(config, config.hardware.cpus_per_node // config.hardware.gpus_per_node)


def controller_cpus(config: LibraConfig) -> int:
    """Processors of the controller step: whole cores."""
    return whole_cores(config, config.slurm.controller_cpus)


def trainer_rank_cpus(config: LibraConfig, ranks_per_node: int) -> int:
    """Processors of one trainer rank: the controller shares the trainer's first node and takes its own from the trainer's."""
    return _at_least_a_core(config, (ranks_per_node * slot_cpus(config) - controller_cpus(config)) // ranks_per_node)


def _at_least_a_core(config: LibraConfig, processors: int) -> int:
    threads = config.hardware.threads_per_core
    return max(1, processors // threads) * threads


def check_processors(config: LibraConfig, *, separate: bool) -> None:
    """Every node has processors for its steps; on the trainer's first node the controller is one of them.

    Slurm refuses a job whose steps want more than a node has; on this one machine nobody counts. Raises PlanError.
    """
    per_node, available = config.hardware.gpus_per_node, config.hardware.cpus_per_node
    ranks = min(config.train_gpus, per_node)
    beside = 0 if separate else min(config.rollout_gpus, per_node - ranks)
    first = ranks * trainer_rank_cpus(config, ranks) + controller_cpus(config) + beside * slot_cpus(config)
    wanted = max(first, min(config.rollout_gpus, per_node) * slot_cpus(config))
    if config.launch.mode != "local" and wanted > available:
        raise PlanError(
            f"a node of train_gpus={config.train_gpus} and rollout_gpus={config.rollout_gpus} wants {wanted} processors (one"
            f" controller of slurm.controller_cpus={config.slurm.controller_cpus}), available hardware.cpus_per_node={available};"
            " lower train_gpus or change hardware.cpus_per_node"
        )


def component_sizes(config: LibraConfig, nodes: int) -> tuple[int, ...]:
    """Nodes of each rollout component for a pool of `nodes`. Raises PlanError when those asked for are not as many.

    What was allocated may be more than a smaller pool needs; a job is asked for no node that stays idle.
    """
    given = tuple(config.slurm.rollout_component_nodes)
    if not given:
        each = math.ceil(nodes / MAX_ROLLOUT_COMPONENTS)
        return tuple(min(each, nodes - first) for first in range(0, nodes, each))
    total = sum(given)
    if total < nodes or (total > nodes and config.launch.mode != "allocation"):
        raise PlanError(
            f"slurm.rollout_component_nodes={list(given)} holds {total} nodes, rollout_gpus={config.rollout_gpus} wants {nodes};"
            " change one of them (an empty slurm.rollout_component_nodes fits any number)"
        )
    return given


def place_rollout(config: LibraConfig, *, separate: bool, first_gpu: int = 0) -> RolloutLayout:
    """Instances in order over nodes and components.

    `separate`: the pool has its own nodes in components 1.. ; otherwise everything is component 0 and the pool starts
    behind `first_gpu` GPUs that the trainer holds. Raises PlanError when an instance would cross nodes.
    """
    per_node, tp = config.hardware.gpus_per_node, config.vllm_tp_size
    check_instances(config, separate=separate)
    nodes = aligned_nodes(config.rollout_gpus, per_node, "rollout_gpus") if separate else 1
    sizes = component_sizes(config, nodes) if separate else ()
    places = [(1 + component, node) for component, size in enumerate(sizes) for node in range(size)]
    instances = []
    for index in range(config.rollout_gpus // tp):
        node = (first_gpu + index * tp) // per_node
        component, local = places[node] if separate else (0, node)
        instances.append(InstancePlacement(f"rollout_{index:03d}", tp, component, local))
    if not separate:
        nodes = instances[-1].node + 1
    return RolloutLayout(config.rollout_gpus, nodes, min(config.rollout_gpus, per_node), tuple(instances))
