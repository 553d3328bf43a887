"""Soft overlong punishment: the formula of DAPO, what it changes in a batch and what it leaves alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import LibraConfig
from conf.sections import AlgorithmConfig
from stages.controller.batching import build_batch, describe_groups
from stages.controller.groups import Completion, FinishedGroup, Prompt
from stages.controller.overlong import OverlongPunishment
from stages.controller.tasks.base import Problem

LIMIT, BUFFER = 16, 4
PUNISHMENT = OverlongPunishment(max_tokens=LIMIT, buffer_tokens=BUFFER, penalty=1.0)


def answer(length: int, *, finished: bool = True) -> Completion:
    return Completion([7] * length, [-0.5] * length, [0] * length, finished)


def group(*answers: Completion) -> FinishedGroup:
    """Every answer is right."""
    return FinishedGroup(0, Prompt(0, Problem("p", "a"), [1]), list(answers), [1.0] * len(answers), 0.0, 1.0)


def equation_13(length: int, longest: int, cache: int) -> float:
    """R_length of arXiv 2503.14476, written down once more from the paper."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("length", "taken_off"), [(1, 0.0), (12, 0.0), (13, 0.25), (14, 0.5), (15, 0.75), (16, 1.0)])
def test_the_reward_falls_linearly_within_the_buffer(length: int, taken_off: float) -> None:
    assert PUNISHMENT.taken_off(answer(length)) == taken_off


@given(limit=st.integers(1, 64), length=st.integers(1, 64), buffer=st.integers(1, 64), penalty=st.floats(0.0, 4.0))
def test_the_punishment_is_the_formula_of_the_paper(limit: int, length: int, buffer: int, penalty: float) -> None:
    length = min(length, limit)
    punishment = OverlongPunishment(limit, buffer, penalty)

    assert punishment.taken_off(answer(length)) == pytest.approx(-penalty * equation_13(length, limit, buffer))


@given(length=st.integers(1, LIMIT))
def test_an_answer_that_was_cut_off_gets_the_whole_penalty(length: int) -> None:
    assert PUNISHMENT.taken_off(answer(length, finished=False)) == PUNISHMENT.penalty


@given(length=st.integers(1, LIMIT), finished=st.booleans())
def test_without_a_buffer_nothing_is_taken_off(length: int, finished: bool) -> None:
    punishment = OverlongPunishment(LIMIT, 0, 5.0)

    assert punishment.taken_off(answer(length, finished=finished)) == 0.0


def test_the_options_of_the_run_decide() -> None:
    config = LibraConfig(max_new_tokens=40, algorithm=AlgorithmConfig(overlong_buffer_tokens=10, overlong_penalty=0.5))

    punishment = OverlongPunishment.of(config)

    assert (punishment.taken_off(answer(30)), punishment.taken_off(answer(35))) == (0.0, 0.25)


def test_advantages_feel_the_punishment_and_rewards_stay_the_verifiers() -> None:
    batch = build_batch([group(answer(4), answer(LIMIT))], normalize_advantage=False, overlong=PUNISHMENT)

    assert batch.rewards.tolist() == [1.0, 1.0]
    assert batch.advantages.tolist() == [0.5, -0.5]


def test_the_batch_says_how_many_answers_were_overlong_and_what_that_cost() -> None:
    answers = (answer(4), answer(14), answer(LIMIT), answer(LIMIT, finished=False))

    described = describe_groups([group(*answers)], step=0, overlong=PUNISHMENT)

    assert described["overlong_share"] == 0.75
    assert described["overlong_taken_off"] == (0.5 + 1.0 + 1.0) / 4
    assert described["uniform_groups"] == 1
