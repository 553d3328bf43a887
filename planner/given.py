"""A configuration for nodes that somebody else has already asked for: what fits, near to what was meant. Pure.

Sizes are those of the smallest node: steps are made for equal nodes. Options that the command line sets are kept, or refused with
wanted and available; all others follow the allocation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from conf.schema import LibraConfig
from planner.allocation import divided
from planner.errors import PlanError
from planner.limits import check_ranks, check_split
from planner.placement import check_launchable

SIDES = ("train_gpus", "rollout_gpus")
MOST_TRIED = 5000
"""Divisions that are looked at before a small allocation is given up; the fullest come first."""
SUBMIT = "launch.mode=slurm submits a job of its own instead"


@dataclass(frozen=True)
class GivenNodes:
    """Nodes of one component of an allocation; sizes are those of its smallest node."""

    nodes: int
    gpus_per_node: int
    cpus_per_node: int

    def __str__(self) -> str:
        return f"{self.nodes} node(s) with {self.gpus_per_node} GPUs and {self.cpus_per_node} processors"


@dataclass(frozen=True)
class Given:
    """A whole allocation: one component of an ordinary job, several of a heterogeneous one."""

    job_id: str
    components: tuple[GivenNodes, ...]

    @property
    def is_het(self) -> bool:
        return len(self.components) > 1

    def __str__(self) -> str:
        return f"job {self.job_id}: {', '.join(str(component) for component in self.components)}"


def fitted(config: LibraConfig, given: Given, fixed: Collection[str]) -> LibraConfig:
    """`config` with the shape of `given` and a division that can be started in it; `fixed` are the options that must stay.

    Raises PlanError.
    """
    config = _divided(_shaped(config, given, fixed), given, fixed)
    if given.is_het and "slurm.rollout_component_nodes" not in fixed:
        sizes = [component.nodes for component in given.components[1:]]
        config = replace(config, slurm=replace(config.slurm, rollout_component_nodes=sizes))
    return config


# ---- the nodes ------------------------------------------------------------------------------------------------------


def _shaped(config: LibraConfig, given: Given, fixed: Collection[str]) -> LibraConfig:
    layout = "hetjob" if given.is_het else "single"
    if "slurm.layout" in fixed and config.slurm.layout != layout:
        raise PlanError(
            f"slurm.layout={config.slurm.layout} wants {'several components' if layout == 'single' else 'one component'},"
            f" available {given}; leave slurm.layout out, or {SUBMIT}"
        )
    hardware = config.hardware
    gpus = _per_node(config, "gpus_per_node", _slots(config, given), given, fixed)
    cpus = _per_node(config, "cpus_per_node", min(one.cpus_per_node for one in given.components), given, fixed)
    has_gpus = any(component.gpus_per_node for component in given.components)
    flag = config.slurm.gpu_flag if has_gpus else "none"
    # Planned again from its config.yaml, the run must not look for components that an ordinary job does not have.
    slurm = replace(config.slurm, layout=layout, gpu_flag=flag, rollout_component_nodes=[])
    return replace(config, slurm=slurm, hardware=replace(hardware, gpus_per_node=gpus, cpus_per_node=cpus))


def _slots(config: LibraConfig, given: Given) -> int:
    """GPUs of the smallest node. Where nodes have none, a machine of device "cpu" has its slots for workers anyway."""
    found = min(component.gpus_per_node for component in given.components)
    if found:
        return found
    if config.hardware.device == "cpu":
        return min(config.hardware.gpus_per_node, *(component.cpus_per_node for component in given.components))
    raise PlanError(
        f"hardware.device=cuda wants GPUs, available none on every node of {given}; allocate them (--gpus-per-node=N), or {SUBMIT}"
    )


def _per_node(config: LibraConfig, name: str, available: int, given: Given, fixed: Collection[str]) -> int:
    wanted: int = getattr(config.hardware, name)
    if f"hardware.{name}" not in fixed:
        return available
    if wanted > available:
        raise PlanError(
            f"hardware.{name}={wanted}, available {available} on the smallest node of {given}; lower it, or leave it out"
        )
    return wanted


# ---- the division ---------------------------------------------------------------------------------------------------


def _divided(config: LibraConfig, given: Given, fixed: Collection[str]) -> LibraConfig:
    """The fullest division that can be started, and among those the one nearest to the ratio that was meant.

    For grp the sum counts, not the sides.
    """
    if given.is_het:
        # The components have divided the nodes already; nothing is left to the planner.
        planner = replace(config.global_resource_planner, initial_allocation_strategy="configured")
        config = replace(config, global_resource_planner=planner)
    kept = [name for name in SIDES if name in fixed]
    reason = ""
    for train_gpus, rollout_gpus in islice(_candidates(config, given, kept), MOST_TRIED):
        candidate = divided(
            config, train_gpus=train_gpus, rollout_gpus=rollout_gpus, train_tp_size=config.train_tp_size
        )
        try:
            _check(candidate, is_het=given.is_het)
        except PlanError as error:
            reason = reason or str(error)
        else:
            return candidate
    wanted = " and ".join(f"{name}={getattr(config, name)}" for name in kept) or "train_gpus and rollout_gpus"
    change = f"change {' or '.join(kept)}, or leave them out" if kept else "allocate more"
    raise PlanError(f"{wanted} cannot be had from {given}{f' ({reason})' if reason else ''}; {change}, or {SUBMIT}")


def _is_searched(config: LibraConfig) -> bool:
    return config.global_resource_planner.initial_allocation_strategy == "grp"


def _check(config: LibraConfig, *, is_het: bool) -> None:
    """What the planner demands of a division that was asked for, as far as the model does not matter."""
    check_launchable(config, separate=is_het)
    if not _is_searched(config):
        if config.train_tp_size > config.hardware.gpus_per_node:
            raise PlanError(
                f"train_tp_size={config.train_tp_size} is more than hardware.gpus_per_node={config.hardware.gpus_per_node};"
                " lower train_tp_size"
            )
        check_split(config)
        check_ranks(config)


def _candidates(config: LibraConfig, given: Given, kept: Collection[str]) -> Iterator[tuple[int, int]]:
    """(train_gpus, rollout_gpus), the best first."""
    per_node = config.hardware.gpus_per_node
    rooms = [component.nodes * per_node for component in given.components]
    most_train, most_rollout = (rooms[0], sum(rooms[1:])) if given.is_het else (rooms[0], rooms[0])
    asked = config.train_gpus + config.rollout_gpus
    totals: Iterable[int] = range(sum(rooms), 1, -1)
    if len(kept) == len(SIDES):
        totals = [asked] if asked <= sum(rooms) else []
    kept = () if _is_searched(config) else kept
    for total in totals:
        pairs = [
            (train, total - train)
            for train in range(max(1, total - most_rollout), min(most_train, total - 1) + 1)
            if ("train_gpus" not in kept or train == config.train_gpus)
            and ("rollout_gpus" not in kept or total - train == config.rollout_gpus)
        ]
        yield from sorted(pairs, key=lambda pair: (abs(pair[0] * asked - config.train_gpus * sum(pair)), pair))
