"""initial_allocation_strategy=grp: train_gpus + rollout_gpus divided by search, with the training side's tensor parallelism.

A tree: tensor-parallel size, then size of the training side. A branch is cut as soon as something rules it out whole, and
every cut is kept with its reason. What is left is compared by the step time that the cost model expects.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import LibraConfig
from planner.allocation import divided
from planner.architecture import Architecture
from planner.efficiency import EXPECTED
from planner.errors import PlanError
from planner.lengths import longest_possible
from planner.limits import (
    PLANNER,
    check_instance,
    check_ranks,
    check_rollout_memory,
    check_split,
    check_train_tp,
    check_train_tp_allowed,
    check_trainer_memory,
    tensor_parallel_candidates,
)
from planner.placement import check_launchable, choose_layout
from planner.plan import Choice, Rejected
from planner.rejections import Rejections
from planner.rollout_cost import generate_seconds
from planner.train_cost import train_seconds

REASONS_SHOWN = 6


@dataclass(frozen=True)
class Found:
    """`choices` has the best first; `evaluated` counts the divisions whose training time was computed."""

    choices: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    evaluated: int


def search(config: LibraConfig, arch: Architecture) -> Found:
    """Raises PlanError when no division can be launched and fits."""
    check_instance(config, arch)
    check_rollout_memory(config, arch)
    rejections = Rejections()
    splits = launchable_splits(config, rejections)
    generate_s = {split.rollout_gpus: _generate_s(split, arch) for split in splits}
    choices: list[Choice] = []
    for tp in tensor_parallel_candidates(config):
        branch = divided(config, train_gpus=config.train_gpus, rollout_gpus=config.rollout_gpus, train_tp_size=tp)
        try:
            check_train_tp(branch, arch)
            check_train_tp_allowed(branch, arch)
        except PlanError as error:
            rejections.branch(f"train_tp_size={tp}", error)
            continue
        for candidate in fitting(splits, tp, arch, rejections):
            seconds = sum(train_seconds(candidate, arch, longest_possible(config), EXPECTED).values())
            sizes = (candidate.train_gpus, candidate.rollout_gpus, tp)
            choices.append(Choice(*sizes, train_s=seconds, generate_s=generate_s[candidate.rollout_gpus]))
    if not choices:
        raise PlanError(_nothing_fits(config, rejections.entries()))
    return Found(tuple(sorted(choices, key=lambda choice: choice.rank)), rejections.entries(), len(choices))


def launchable_splits(config: LibraConfig, rejections: Rejections) -> list[LibraConfig]:
    """Divisions that placement can start and the planner's options allow, by size of the training side."""
    separate, total = choose_layout(config)[0] == "hetjob", config.train_gpus + config.rollout_gpus
    splits = []
    for train_gpus in range(1, total):
        split = divided(
            config,
            train_gpus=train_gpus,
            rollout_gpus=total - train_gpus,
            train_tp_size=config.train_tp_size,
        )
        try:
            check_split(split)
            check_launchable(split, separate=separate)
        except PlanError as error:
            rejections.size("", train_gpus, error)
        else:
            splits.append(split)
    return splits


def fitting(splits: list[LibraConfig], tp: int, arch: Architecture, rejections: Rejections) -> list[LibraConfig]:
    """The splits that this tensor-parallel size can train, largest training side first.

    More replicas only ever take memory away from each rank, so the first that is too big rules out all smaller ones.
    """
    branch, kept = f"train_tp_size={tp}", []
    too_big: PlanError | None = None
    for split in reversed(splits):
        candidate = divided(split, train_gpus=split.train_gpus, rollout_gpus=split.rollout_gpus, train_tp_size=tp)
        try:
            check_ranks(candidate)
        except PlanError as error:
            rejections.size(branch, split.train_gpus, error)
            continue
        try:
            if too_big is not None:
                raise too_big
            check_trainer_memory(candidate, arch)
        except PlanError as error:
            too_big = error
            rejections.size(branch, split.train_gpus, error)
        else:
            kept.append(candidate)
    return kept


def _generate_s(config: LibraConfig, arch: Architecture) -> float:
    return sum(generate_seconds(config, arch, longest_possible(config), EXPECTED).values())


def _nothing_fits(config: LibraConfig, rejected: tuple[Rejected, ...]) -> str:
    total = config.train_gpus + config.rollout_gpus
    reasons = "".join(f"\n    {cut.branch}: {cut.reason}" for cut in rejected[:REASONS_SHOWN])
    more = f"\n    and {len(rejected) - REASONS_SHOWN} more" if len(rejected) > REASONS_SHOWN else ""
    return (
        f"{PLANNER}.initial_allocation_strategy=grp: train_gpus + rollout_gpus = {total} GPUs cannot be divided; change"
        f" train_gpus or rollout_gpus (their sum counts) or what rules each division out:{reasons}{more}"
    )
