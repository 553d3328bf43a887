"""The learning rate is a function of the step alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import LibraConfig
from conf.sections import AlgorithmConfig
from stages.trainer.schedule import learning_rate


def config(schedule: str, *, warmup: int = 0, total: int = 10, floor: float = 0.0) -> LibraConfig:
    algorithm = AlgorithmConfig(lr_schedule=schedule, lr_warmup_steps=warmup, lr_min_ratio=floor)
    return LibraConfig(learning_rate=2.0, total_steps=total, algorithm=algorithm)


def test_the_rise_is_linear_and_reaches_the_peak_with_its_last_step() -> None:
    rates = [learning_rate(step, config("constant", warmup=4)) for step in range(6)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_decay_would_reach_its_floor_after_the_last_step() -> None:
    rates = [learning_rate(step, config("linear", total=4, floor=0.5)) for step in range(5)]
    assert rates == [2.0, 1.75, 1.5, 1.25, 1.0]


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert learning_rate(5, config("cosine")) == pytest.approx(1.0)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 12),
    total=st.integers(1, 12),
    floor=st.floats(0.0, 1.0),
)
def test_after_the_rise_rates_never_grow_and_never_leave_their_bounds(
    schedule: str, warmup: int, total: int, floor: float
) -> None:
    options = config(schedule, warmup=warmup, total=total, floor=floor)

    rates = [learning_rate(step, options) for step in range(total)]

    assert all(0 < rate <= 2.0 + 1e-12 for rate in rates)
    after = rates[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
    assert all(rate >= 2.0 * floor - 1e-12 for rate in after)
