"""Trajectories, groups of them, and what a group's rewards are worth to each member."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from stages.controller.staleness import Bounds, is_fresh
from stages.controller.tasks.base import Problem

UNIFORM = 1e-6  # rewards closer together than this carry no signal


@dataclass(frozen=True)
class Prompt:
    """A problem as the policy sees it. `index` is its place in the task's training stream."""

    index: int
    problem: Problem
    token_ids: list[int]


@dataclass(frozen=True)
class Completion:
    """One answer of an instance.

    `logprobs` and `versions` have one entry for each of `token_ids`: the log-prob under the sampling distribution and
    the weight version that produced the token. `finished` is False when max_new_tokens cut the answer off.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finished: bool


@dataclass(frozen=True)
class FinishedGroup:
    """The n_samples scored answers to one prompt. Times are of this process's monotonic clock."""

    group: int
    prompt: Prompt
    completions: list[Completion]
    rewards: list[float]
    started_s: float
    finished_s: float

    @property
    def oldest_version(self) -> int:
        return min(min(completion.versions) for completion in self.completions)

    @property
    def reward_mean(self) -> float:
        return fmean(self.rewards)

    @property
    def response_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def is_uniform(self) -> bool:
        """All of the verifier's rewards equal: no answer is better than another, whatever its length."""
        return max(self.rewards) - min(self.rewards) <= UNIFORM


def advantages(rewards: list[float], *, normalize: bool) -> list[float]:
    """The group-centred rewards of GRPO (arXiv 2402.03300, eq. 3), divided by the sample standard deviation if asked.

    All zeros for a group of equal rewards, also with `normalize` (0 / 0).
    """
    mean = fmean(rewards)
    centred = [reward - mean for reward in rewards]
    if max(rewards) - min(rewards) <= UNIFORM:
        return [0.0] * len(rewards)
    if not normalize:
        return centred
    deviation = math.sqrt(sum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (deviation + UNIFORM) for value in centred]


class WaitingGroups:
    """Finished groups that no batch has taken yet."""

    def __init__(self) -> None:
        self._groups: dict[int, FinishedGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: FinishedGroup) -> None:
        self._groups[group.group] = group

    def expire(self, bounds: Bounds, step: int) -> list[FinishedGroup]:
        """Remove and return the groups too stale for batch `step`, so for every later one."""
        expired = [group for group in self._groups.values() if not is_fresh(bounds, step, group.oldest_version)]
        for group in expired:
            del self._groups[group.group]
        return expired

    def take(self, bounds: Bounds, step: int) -> list[FinishedGroup] | None:
        """The groups of batch `step`, oldest version first, or None while there are not enough.

        Call `expire` for the same step before: a group that is too stale would be taken, so it is an error here.
        """
        if len(self._groups) < bounds.groups_per_batch:
            return None
        order = sorted(self._groups.values(), key=lambda group: (group.oldest_version, group.group))
        taken = order[: bounds.groups_per_batch]
        assert all(is_fresh(bounds, step, group.oldest_version) for group in taken)
        for group in taken:
            del self._groups[group.group]
        return taken
