"""Properties of the GRPO objective that hold for all inputs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.trainer.loss import Objective, behaviour_weights, kl_estimate, policy_terms

OBJECTIVE = Objective(clip_low=0.2, clip_high=0.28, behaviour_weight_cap=5.0, kl_coef=0.0)
logprobs = st.floats(-20.0, 0.0, width=32)
advantages = st.floats(-4.0, 4.0, width=32)
tokens = st.lists(st.tuples(logprobs, logprobs, logprobs, advantages), min_size=1, max_size=12)


def columns(rows: list[tuple[float, ...]]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


def objective_sum(rows: list[tuple[float, ...]], objective: Objective) -> torch.Tensor:
    current, proximal, behaviour, advantage = columns(rows)
    weights = behaviour_weights(proximal, behaviour, objective.behaviour_weight_cap)
    return policy_terms(current, proximal, advantage, weights, objective).loss


@given(rows=tokens, kl_coef=st.sampled_from([0.0, 0.1]), cut=st.integers(0, 12))
def test_the_sum_does_not_depend_on_how_tokens_are_grouped(
    rows: list[tuple[float, ...]], kl_coef: float, cut: int
) -> None:
    objective = replace(OBJECTIVE, kl_coef=kl_coef)
    parts = [part for part in (rows[:cut], rows[cut:]) if part]

    whole, pieces = objective_sum(rows, objective), sum(objective_sum(part, objective) for part in parts)

    assert float(pieces) == pytest.approx(float(whole), rel=1e-9, abs=1e-9)


@given(rows=tokens)
def test_on_policy_it_is_the_policy_gradient(rows: list[tuple[float, ...]]) -> None:
    current, _, _, advantage = columns(rows)
    current.requires_grad_()
    proximal = current.detach()

    terms = policy_terms(current, proximal, advantage, behaviour_weights(proximal, proximal, 5.0), OBJECTIVE)
    terms.loss.backward()

    torch.testing.assert_close(terms.loss.detach(), -advantage.sum())
    torch.testing.assert_close(current.grad, -advantage)
    assert terms.clipped == 0


@given(rows=tokens)
def test_the_clip_never_makes_the_objective_better(rows: list[tuple[float, ...]]) -> None:
    current, proximal, _, advantage = columns(rows)
    ones = torch.ones_like(current)

    clipped = policy_terms(current, proximal, advantage, ones, OBJECTIVE).loss
    free = -((current - proximal).exp() * advantage).sum()

    assert float(clipped) >= float(free) - 1e-9 * abs(float(free)) - 1e-9


@pytest.mark.parametrize("advantage, shift", [(1.0, math.log(1.29)), (-1.0, math.log(0.79))])
def test_a_ratio_beyond_its_bound_gets_no_gradient_that_would_push_it_further(advantage: float, shift: float) -> None:
    current = torch.tensor([-2.0 + shift], requires_grad=True)

    terms = policy_terms(current, torch.tensor([-2.0]), torch.tensor([advantage]), torch.ones(1), OBJECTIVE)
    terms.loss.backward()

    assert terms.clipped == 1
    assert current.grad == 0


@pytest.mark.parametrize("advantage, shift", [(-1.0, math.log(1.29)), (1.0, math.log(0.79))])
def test_a_ratio_beyond_its_bound_is_still_pulled_back(advantage: float, shift: float) -> None:
    current = torch.tensor([-2.0 + shift], requires_grad=True)

    terms = policy_terms(current, torch.tensor([-2.0]), torch.tensor([advantage]), torch.ones(1), OBJECTIVE)
    terms.loss.backward()

    assert terms.clipped == 0
    assert current.grad is not None
    assert float(current.grad) == pytest.approx(-math.exp(shift) * advantage)


@given(proximal=logprobs, behaviour=logprobs, cap=st.floats(1.0, 10.0))
def test_behaviour_weights_are_importance_ratios_up_to_the_cap(proximal: float, behaviour: float, cap: float) -> None:
    weight = float(behaviour_weights(torch.tensor([proximal]).double(), torch.tensor([behaviour]).double(), cap))

    assert weight == pytest.approx(min(math.exp(proximal - behaviour), cap), rel=1e-5)


@given(current=logprobs, reference=logprobs)
def test_the_kl_estimate_is_never_negative_and_zero_at_equality(current: float, reference: float) -> None:
    a, b = torch.tensor([current]).double(), torch.tensor([reference]).double()

    assert float(kl_estimate(a, b)) >= 0
    assert float(kl_estimate(a, a)) == 0


@given(rows=tokens, scale=st.floats(0.125, 8.0))
def test_the_loss_grows_in_proportion_to_the_advantages(rows: list[tuple[float, ...]], scale: float) -> None:
    scaled = [(*row[:3], row[3] * scale) for row in rows]

    assert float(objective_sum(scaled, OBJECTIVE)) == pytest.approx(
        scale * float(objective_sum(rows, OBJECTIVE)), rel=1e-6, abs=1e-9
    )
