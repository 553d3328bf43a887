"""What the planner may choose from, and whether anything is left to choose."""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import GlobalResourcePlannerConfig, LibraConfig

SECTION = "global_resource_planner"


def given_split_above_floors(config: LibraConfig) -> Iterator[str]:
    planner = config.global_resource_planner
    if planner.initial_allocation_strategy != "configured":
        return
    for side, given, floor in (
        ("train", config.train_gpus, planner.min_train_gpus),
        ("rollout", config.rollout_gpus, planner.min_rollout_gpus),
    ):
        if given < floor:
            yield (
                f"{side}_gpus={given} is below {SECTION}.min_{side}_gpus={floor}; raise {side}_gpus or lower the floor"
            )


def given_split_in_whole_units(config: LibraConfig) -> Iterator[str]:
    planner = config.global_resource_planner
    unit = max(1, planner.allocation_granularity_gpus)
    if planner.initial_allocation_strategy == "configured" and config.train_gpus % unit:
        yield (
            f"train_gpus={config.train_gpus} is not a multiple of {SECTION}.allocation_granularity_gpus={unit};"
            " change one of them"
        )


def given_tensor_parallel_allowed(config: LibraConfig) -> Iterator[str]:
    planner = config.global_resource_planner
    allowed = planner.allowed_train_tp
    if planner.initial_allocation_strategy == "configured" and allowed and config.train_tp_size not in allowed:
        yield (
            f"train_tp_size={config.train_tp_size} is not one of {SECTION}.allowed_train_tp={allowed};"
            " change one of them"
        )


def room_to_divide(config: LibraConfig) -> Iterator[str]:
    """For grp: the two floors fit into the sum, and a whole number of units lies between them."""
    planner = config.global_resource_planner
    if planner.initial_allocation_strategy != "grp":
        return
    total = config.train_gpus + config.rollout_gpus
    least_rollout = max(planner.min_rollout_gpus, config.vllm_tp_size)
    if planner.min_train_gpus + least_rollout > total:
        yield (
            f"{SECTION}.min_train_gpus={planner.min_train_gpus} and {SECTION}.min_rollout_gpus={planner.min_rollout_gpus}"
            f" (an instance has vllm_tp_size={config.vllm_tp_size}) want {planner.min_train_gpus + least_rollout} GPUs,"
            f" available train_gpus + rollout_gpus = {total}; lower the floors or raise train_gpus or rollout_gpus"
        )
        return
    unit = max(1, planner.allocation_granularity_gpus)
    most_train = (total - least_rollout) // unit * unit
    if most_train < planner.min_train_gpus:
        yield (
            f"{SECTION}.allocation_granularity_gpus={unit}: no multiple of it between"
            f" {SECTION}.min_train_gpus={planner.min_train_gpus} and the {total - least_rollout} GPUs that rollout leaves"
            f" of {total}; lower {SECTION}.allocation_granularity_gpus"
        )


def candidates_inside_a_node(config: LibraConfig) -> Iterator[str]:
    per_node = config.hardware.gpus_per_node
    outside = [size for size in config.global_resource_planner.allowed_train_tp if size > per_node]
    if outside:
        yield (
            f"{SECTION}.allowed_train_tp holds {outside}, more than hardware.gpus_per_node={per_node}; tensor parallelism"
            f" stays inside a node: take them out of {SECTION}.allowed_train_tp"
        )


def candidates_named_once(config: LibraConfig) -> Iterator[str]:
    for name, sizes in _candidates(config.global_resource_planner).items():
        twice = sorted({size for size in sizes if sizes.count(size) > 1})
        if twice:
            yield f"{SECTION}.{name}={sizes} names {twice} twice; name each size once"


def _candidates(planner: GlobalResourcePlannerConfig) -> dict[str, list[int]]:
    return {name: getattr(planner, name) for name in ("allowed_train_tp", "allowed_train_ep", "allowed_train_pp")}


RULES = (
    given_split_above_floors,
    given_split_in_whole_units,
    given_tensor_parallel_allowed,
    room_to_divide,
    candidates_inside_a_node,
    candidates_named_once,
)
