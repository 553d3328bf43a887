"""The prompt that shows whether the prefix cache was reset."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rollout.compat import canary_prompt

VOCABULARY = 50
PROBES = st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=40).map(tuple)


@settings(max_examples=50)
@given(PROBES, st.integers(1, 64))
def test_a_canary_fills_one_block_that_no_probe_can_have_filled(probe: tuple[int, ...], block_tokens: int) -> None:
    canary = canary_prompt(probe, block_tokens, VOCABULARY)

    assert len(canary) == block_tokens + 1
    assert all(0 <= token < VOCABULARY for token in canary)
    assert canary[:1] != probe[:1]
