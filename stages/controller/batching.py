"""Finished groups become the batch of one optimizer step."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

from stages.batches import Batch, Sequence
from stages.controller.groups import FinishedGroup, advantages
from stages.controller.overlong import OverlongPunishment
from stages.controller.staleness import staleness


def build_batch(groups: list[FinishedGroup], *, normalize_advantage: bool, overlong: OverlongPunishment) -> Batch:
    """All trajectories of `groups`, with the prompt in front: the verifier's rewards, and advantages of the training rewards.

    Raises BatchError for values that break the schema.
    """
    return Batch.pack(
        Sequence.of_completion(
            group.prompt.token_ids,
            completion.token_ids,
            completion.logprobs,
            completion.versions,
            reward=reward,
            advantage=advantage,
            group_id=group.group,
        )
        for group in groups
        for completion, reward, advantage in zip(
            group.completions,
            group.rewards,
            advantages(overlong.training_rewards(group), normalize=normalize_advantage),
            strict=True,
        )
    )


def describe_groups(groups: list[FinishedGroup], step: int, overlong: OverlongPunishment) -> dict[str, Any]:
    """What the batch's manifest says beside its sizes.

    Staleness is in versions, over trajectories; `generate_s` runs from the first prompt sent to the last answer scored.
    `overlong_share` is of all answers, `overlong_taken_off` the mean reward that they lost to their length.
    """
    completions = [completion for group in groups for completion in group.completions]
    ages = [staleness(step, completion.versions[0]) for completion in completions]
    return {
        "reward_std": pstdev(reward for group in groups for reward in group.rewards),
        "uniform_groups": sum(group.is_uniform for group in groups),
        "truncated": sum(not completion.finished for completion in completions),
        "overlong_share": fmean(overlong.is_overlong(completion) for completion in completions),
        "overlong_taken_off": fmean(overlong.taken_off(completion) for completion in completions),
        "staleness_mean": fmean(ages),
        "staleness_max": max(ages),
        "generate_s": max(group.finished_s for group in groups) - min(group.started_s for group in groups),
    }
