"""Sums that tell whether bytes arrived."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rollout.checksums import device_sums, host_sum, word_of
from stages.weights.sums import column_factors

FACTORS = column_factors(4096)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    left=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_a_view_and_its_copy_have_the_same_sum_on_the_host_and_on_the_device(
    rows: int, columns: int, left: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(rows + 1, columns + left + 1, generator=generator).to(dtype)
    source = whole[1:, left : left + columns]
    target = source.clone()
    word = word_of(source, target)

    assert [host_sum(source, word, FACTORS)] == device_sums([target], [word], FACTORS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_change_of_one_element_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 8).to(dtype)
    word = word_of(tensor)
    before = host_sum(tensor, word, FACTORS)

    for position in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1)[position] = torch.nextafter(changed.view(-1)[position], torch.tensor(9.0).to(dtype))
        assert host_sum(changed, word, FACTORS) != before


def test_columns_that_changed_places_change_the_sum() -> None:
    tensor = torch.randn(6, 8)

    assert host_sum(tensor, torch.int64, FACTORS) != host_sum(tensor.roll(2, dims=1), torch.int64, FACTORS)


def test_words_are_as_wide_as_both_views_allow() -> None:
    wide = torch.zeros(4, 8, dtype=torch.bfloat16)

    assert word_of(wide, wide) == torch.int64
    assert word_of(wide[:, 2:6], wide[:, :4]) == torch.int32
    assert word_of(wide[:, 1:5], wide[:, :4]) == torch.int16
    assert word_of(torch.zeros(3, 5)) == torch.int32
