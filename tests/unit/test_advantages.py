"""What the rewards of a group are worth to its members, and how finished groups become a batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.controller.batching import build_batch, describe_groups
from stages.controller.groups import Completion, FinishedGroup, Prompt, WaitingGroups, advantages
from stages.controller.overlong import OverlongPunishment
from stages.controller.staleness import Bounds
from stages.controller.tasks.base import Problem

NO_PUNISHMENT = OverlongPunishment(max_tokens=8, buffer_tokens=0, penalty=1.0)
REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def group(number: int, rewards: list[float], version: int = 0) -> FinishedGroup:
    completions = [Completion([10 + i, 2], [-1.0, -0.5], [version, version], i != 0) for i in range(len(rewards))]
    return FinishedGroup(number, Prompt(number, Problem("p", "a"), [1, 5]), completions, rewards, 10.0, 12.5)


@settings(deadline=None)
@given(rewards=REWARDS, normalize=st.booleans())
def test_advantages_of_a_group_sum_to_zero(rewards: list[float], normalize: bool) -> None:
    assert math.fsum(advantages(rewards, normalize=normalize)) == pytest.approx(0.0, abs=1e-6)


@settings(deadline=None)
@given(rewards=REWARDS, shift=st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards: list[float], shift: float) -> None:
    spread = max(rewards) - min(rewards)
    shifted = advantages([reward + shift for reward in rewards], normalize=False)

    if spread > 1e-5:
        assert shifted == pytest.approx(advantages(rewards, normalize=False), abs=1e-5)


def test_normalised_advantages_have_unit_sample_deviation() -> None:
    values = advantages([0.0, 1.0, 1.0, 4.0], normalize=True)

    assert math.sqrt(sum(value**2 for value in values) / 3) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_are_worth_nothing(normalize: bool) -> None:
    assert advantages([0.3, 0.3, 0.3], normalize=normalize) == [0.0, 0.0, 0.0]


def test_a_batch_holds_every_trajectory_with_its_prompt_reward_and_group() -> None:
    groups = [group(4, [0.0, 1.0]), group(6, [1.0, 1.0])]

    batch = build_batch(groups, normalize_advantage=False, overlong=NO_PUNISHMENT)

    assert batch.token_ids.tolist() == [1, 5, 10, 2, 1, 5, 11, 2] * 2
    assert batch.loss_mask.tolist() == [0, 0, 1, 1] * 4
    assert batch.rewards.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert batch.advantages.tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert batch.group_ids.tolist() == [4, 4, 6, 6]


def test_the_description_of_a_batch_counts_versions_back_from_its_step() -> None:
    groups = [group(0, [0.0, 1.0], version=3), group(1, [1.0, 1.0], version=4)]

    described = describe_groups(groups, step=5, overlong=NO_PUNISHMENT)

    assert (described["staleness_mean"], described["staleness_max"]) == (1.5, 2)
    assert (described["uniform_groups"], described["truncated"], described["generate_s"]) == (1, 2, 2.5)


def test_the_oldest_groups_are_taken_first() -> None:
    waiting, bounds = WaitingGroups(), Bounds(2, 2, 10, 100)
    for number, version in ((5, 3), (6, 2), (7, 2)):
        waiting.add(group(number, [0.0, 1.0], version))

    taken = waiting.take(bounds, step=4)

    assert taken is not None
    assert [member.group for member in taken] == [6, 7]
    assert len(waiting) == 1


def test_groups_too_stale_for_a_step_are_given_back() -> None:
    waiting, bounds = WaitingGroups(), Bounds(1, 1, 10, 100)
    for number, version in ((0, 1), (1, 2)):
        waiting.add(group(number, [0.0, 1.0], version))

    expired = waiting.expire(bounds, step=3)

    assert [member.group for member in expired] == [0]
    assert len(waiting) == 1


def test_one_old_token_makes_the_whole_group_old() -> None:
    fresh = group(0, [0.0, 1.0], version=4)
    mixed = replace(fresh, completions=[fresh.completions[0], replace(fresh.completions[1], versions=[2, 4])])
    waiting = WaitingGroups()
    waiting.add(mixed)

    assert mixed.oldest_version == 2
    assert waiting.expire(Bounds(1, 1, 10, 100), step=4) == [mixed]
