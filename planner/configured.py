"""initial_allocation_strategy=configured: the division that was asked for, and the tensor-parallel sizes beside it."""

from __future__ import annotations

from conf.schema import LibraConfig
from planner.allocation import divided
from planner.architecture import Architecture
from planner.errors import PlanError, problems_of
from planner.limits import (
    check_instance,
    check_ranks,
    check_rollout_memory,
    check_split,
    check_train_tp,
    check_train_tp_allowed,
    check_trainer_memory,
    tensor_parallel_candidates,
)
from planner.placement import aligned_nodes, check_instances, check_processors, check_shared_nodes, choose_layout
from planner.plan import Choice
from planner.predict import expected
from planner.rejections import Rejections


def check_configured(config: LibraConfig, arch: Architecture) -> tuple[list[Choice], Rejections]:
    """Other tensor-parallel sizes that fit these GPUs, and those that do not. Raises PlanError, with everything that is
    wrong, when the one asked for does not."""
    found = layout_problems(config, arch)
    if found:
        raise PlanError(*found)
    fitting, rejections = survey(config, arch)
    others = [choice for choice in fitting if choice.train_tp_size != config.train_tp_size]
    hint = f"; train_tp_size={others[0].train_tp_size} would fit" if others else ""
    found = memory_problems(config, arch, hint)
    if found:
        raise PlanError(*found)
    return others, rejections


def division_problems(config: LibraConfig, arch: Architecture) -> list[str]:
    """Why the division that was asked for cannot be had; empty where the planner divides."""
    if config.global_resource_planner.initial_allocation_strategy != "configured":
        return []
    return layout_problems(config, arch) or memory_problems(config, arch)


def memory_problems(config: LibraConfig, arch: Architecture, hint: str = "") -> list[str]:
    """`hint` ends what is said about the trainer."""
    return problems_of(lambda: check_trainer_memory(config, arch, hint), lambda: check_rollout_memory(config, arch))


def layout_problems(config: LibraConfig, arch: Architecture) -> list[str]:
    """Why the division that was asked for cannot be started, whatever it needs in memory."""
    separate = choose_layout(config)[0] == "hetjob"
    return problems_of(
        lambda: check_split(config),
        lambda: None if separate else check_shared_nodes(config),
        lambda: aligned_nodes(config.train_gpus, config.hardware.gpus_per_node, "train_gpus"),
        lambda: check_instances(config, separate=separate),
        lambda: check_processors(config, separate=separate),
        lambda: check_instance(config, arch),
        lambda: check_train_tp(config, arch),
        lambda: check_train_tp_allowed(config, arch),
        lambda: check_ranks(config),
    )


def survey(config: LibraConfig, arch: Architecture) -> tuple[list[Choice], Rejections]:
    """Every candidate of tensor parallelism for these GPUs."""
    fitting, rejections = [], Rejections()
    for tp in tensor_parallel_candidates(config):
        candidate = divided(config, train_gpus=config.train_gpus, rollout_gpus=config.rollout_gpus, train_tp_size=tp)
        try:
            check_train_tp(candidate, arch)
            check_train_tp_allowed(candidate, arch)
            check_ranks(candidate)
            check_trainer_memory(candidate, arch)
        except PlanError as error:
            rejections.branch(f"train_tp_size={tp}", error)
        else:
            fitting.append(choice_of(candidate, arch))
    return fitting, rejections


def choice_of(config: LibraConfig, arch: Architecture) -> Choice:
    times = expected(config, arch)
    sizes = (config.train_gpus, config.rollout_gpus, config.train_tp_size)
    return Choice(*sizes, train_s=times["train_s"], generate_s=times["generate_s"])
