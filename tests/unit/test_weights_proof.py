"""What the proof of load can tell apart."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from conf.schema import LibraConfig
from conf.sections import RolloutConfig, WeightsConfig
from stages.weights.manifest import Probe
from stages.weights.proof import allowed_difference_nats, probe_change_nats, resolution_nats

EXACT = LibraConfig(
    train_dtype="float32",
    weights=WeightsConfig(dtype="float32", proof_tolerance=1e-3),
    rollout=RolloutConfig(dtype="float32"),
)
logprobs = st.lists(st.floats(-20, 0), min_size=3, max_size=3).map(tuple)


def probe(values: tuple[float, ...]) -> Probe:
    return Probe((1, 2, 3, 4), values)


@given(logprobs, logprobs)
def test_an_engine_that_kept_the_version_before_fails_wherever_the_change_can_be_resolved(
    old: tuple[float, ...], new: tuple[float, ...]
) -> None:
    before, after = probe(old), probe(new)
    change = probe_change_nats(before, after)

    allowed = allowed_difference_nats(1e-3, resolution_nats(EXACT), before, after)

    assert allowed <= 1e-3
    if change > 2 * resolution_nats(EXACT):
        assert change > allowed


def test_a_small_learning_rate_is_still_told_apart_in_float32() -> None:
    before, after = probe((-1.0, -2.0, -3.0)), probe((-1.0, -2.0, -3.0006))

    assert allowed_difference_nats(1e-3, resolution_nats(EXACT), before, after) < 6e-4


def test_the_first_version_is_held_to_the_configured_tolerance() -> None:
    assert allowed_difference_nats(1e-3, resolution_nats(EXACT), None, probe((-1.0, -2.0, -3.0))) == 1e-3


def test_rounding_in_16_bits_is_never_taken_for_a_wrong_version() -> None:
    half = replace(EXACT, rollout=RolloutConfig(dtype="bfloat16"), weights=WeightsConfig(proof_tolerance=0.05))
    before, after = probe((-1.0, -2.0, -3.0)), probe((-1.0, -2.0, -3.06))

    assert allowed_difference_nats(0.05, resolution_nats(half), before, after) == 0.05
