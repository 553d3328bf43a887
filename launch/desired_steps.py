"""Which steps a plan needs, with their places and processors. Pure."""

from __future__ import annotations

from conf.schema import LibraConfig
from launch.errors import LibraError
from planner.placement import controller_cpus, slot_cpus, trainer_rank_cpus
from planner.plan import InstancePlacement, Plan
from stages.desired import DesiredState, StepSpec

TRAINER = "trainer"
CONTROLLER = "controller"


class PlacementError(LibraError, ValueError):
    """The plan cannot be laid out as steps: a fault of the planner or of a hand-written plan."""

    exit_code = 2


def desired_steps(config: LibraConfig, plan: Plan) -> DesiredState:
    """The desired state that a run starts with: rollout instances first, since they start slowest.

    Raises PlacementError when trainer ranks do not fill their nodes or an instance needs more GPUs than a node has.
    """
    trainer = _trainer(config, plan)
    rollouts = [_rollout(config, instance) for instance in plan.rollout.instances]
    return DesiredState(phase="run", steps=(*rollouts, trainer, _controller(config)))


def _trainer(config: LibraConfig, plan: Plan) -> StepSpec:
    train = plan.train
    if train.gpus != train.nodes * train.gpus_per_node:
        raise PlacementError(
            f"{train.gpus} trainer ranks do not fill {train.nodes} nodes x {train.gpus_per_node}; change train_gpus"
        )
    return StepSpec(
        name=TRAINER,
        role="trainer",
        component=0,
        node=0,
        nodes=train.nodes,
        tasks=train.gpus,
        tasks_per_node=train.gpus_per_node,
        cpus_per_task=trainer_rank_cpus(config, train.gpus_per_node),
        gpus_per_node=train.gpus_per_node,
        grace_s=config.launch.stop_grace_s,
    )


def _rollout(config: LibraConfig, instance: InstancePlacement) -> StepSpec:
    if instance.tp > config.hardware.gpus_per_node:
        raise PlacementError(
            f"{instance.name} needs {instance.tp} GPUs on one node, a node has {config.hardware.gpus_per_node};"
            f" lower vllm_tp_size"
        )
    return StepSpec(
        name=instance.name,
        role="rollout",
        component=instance.component,
        node=instance.node,
        nodes=1,
        tasks=1,
        tasks_per_node=1,
        cpus_per_task=instance.tp * slot_cpus(config),
        gpus_per_node=instance.tp,
        # The agent gives its server stop_timeout_s, and then has to end itself.
        grace_s=max(config.launch.stop_grace_s, config.rollout.stop_timeout_s + 2.0),
        restart="replace" if config.rollout.max_replacements else "fatal",
        max_restarts=config.rollout.max_replacements,
    )


def _controller(config: LibraConfig) -> StepSpec:
    return StepSpec(
        name=CONTROLLER,
        role="controller",
        component=0,
        node=0,
        nodes=1,
        tasks=1,
        tasks_per_node=1,
        cpus_per_task=controller_cpus(config),
        gpus_per_node=0,
        grace_s=config.launch.stop_grace_s,
        # What it knew is in the ledger.
        restart="once",
        max_restarts=1,
    )
