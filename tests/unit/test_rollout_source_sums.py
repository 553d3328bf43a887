"""Sums that are added up from pieces, in any order, are those of the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rollout import source_sums
from stages.rollout.checksums import host_sum, stretch_sum, word_of
from stages.rollout.copy_plan import Copy, View
from stages.rollout.source_sums import Source, SourceSums
from stages.weights.sums import column_factors, wrapped

FACTORS = column_factors(64)
NAME = "model.weight"


def make_sums(tensor: torch.Tensor, *views: View, buffers: bool = False) -> tuple[SourceSums, list[int]]:
    """And the plain sums of the same sources."""
    sources = [view.of(tensor) for view in views]
    words = [word_of(source, torch.empty(source.shape, dtype=source.dtype)) for source in sources]
    gathered = {
        index: torch.empty(source.shape, dtype=source.dtype)
        for index, source in enumerate(sources)
        if buffers and not source.is_contiguous()
    }
    copies = [Copy(NAME, view, "parameter", view) for view in views]
    plain = [host_sum(source, word, FACTORS) for source, word in zip(sources, words, strict=True)]
    summed = [Source.of(copy, tensor, word) for copy, word in zip(copies, words, strict=True)]
    return SourceSums(summed, FACTORS, gathered, {}), plain


def cut(num_bytes: int, cuts: set[int]) -> list[tuple[int, int]]:
    """(first, length) of the pieces between `cuts`."""
    places = sorted({0, num_bytes, *(place % num_bytes for place in cuts)})
    return [(begin, end - begin) for begin, end in pairwise(places)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 6),
    width=st.integers(1, 16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cuts=st.sets(st.integers(0, 1000), max_size=6),
    data=st.data(),
)
def test_any_split_gives_the_sums_of_the_whole_for_every_kind_of_source(
    rows: int, width: int, dtype: torch.dtype, cuts: set[int], data: st.DataObject
) -> None:
    tensor = torch.randn(rows, width).to(dtype)
    first = data.draw(st.integers(0, rows - 1))
    left = data.draw(st.integers(0, width - 1))
    sums, plain = make_sums(
        tensor,
        View((rows, width), (width, 1), 0),
        View((rows - first, width), (width, 1), first * width),
        View((rows, width - left), (width, 1), left),
        View((width,), (1,), first * width),
        View((width, rows), (1, width), 0),
        buffers=data.draw(st.booleans()),
    )

    for piece in data.draw(st.permutations(cut(tensor.numel() * tensor.element_size(), cuts))):
        sums.add(NAME, *piece)

    assert sums.complete(was_added=True) == plain
    assert sums.complete(was_added=False) == plain


@settings(max_examples=60, deadline=None)
@given(
    num_words=st.integers(1, 60),
    width=st.integers(1, 20),
    cuts=st.sets(st.integers(0, 1000), max_size=4),
    word=st.sampled_from([torch.int16, torch.int32, torch.int64]),
)
def test_stretches_add_up_to_the_sum(num_words: int, width: int, cuts: set[int], word: torch.dtype) -> None:
    info = torch.iinfo(word)
    rows = torch.randint(info.min, info.max, (-(-num_words // width), width), dtype=word)
    words = rows.view(-1).numpy()

    shares = [
        stretch_sum(words[first : first + length], first, width, FACTORS.numpy())
        for first, length in cut(len(words), cuts)
    ]

    assert wrapped(sum(shares)) == host_sum(rows, word, FACTORS)


def test_a_piece_that_never_arrived_is_missing_in_the_sum() -> None:
    tensor = torch.randn(4, 8)
    sums, plain = make_sums(tensor, View((4, 8), (8, 1), 0))

    sums.add(NAME, 0, 64)

    assert sums.complete(was_added=True) != plain


def test_a_version_that_is_read_anew_is_not_counted_twice() -> None:
    tensor = torch.randn(4, 8)
    sums, plain = make_sums(tensor, View((4, 8), (8, 1), 0))
    sums.add(NAME, 0, 128)

    sums.restart()
    sums.add(NAME, 0, 128)

    assert sums.complete(was_added=True) == plain


def test_columns_are_gathered_and_summed_up_by_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_sums, "_BLOCK_BYTES", 64)
    tensor = torch.randn(40, 16)
    view = View((40, 8), (16, 1), 8)
    buffer = torch.zeros(40, 8)
    source = Source.of(Copy(NAME, view, "parameter", view), tensor, torch.int64)
    sums = SourceSums([source], FACTORS, {0: buffer}, {})

    assert len(sums._sources[0].blocks()) == 20
    assert sums.complete(was_added=True) == [host_sum(tensor[:, 8:], torch.int64, FACTORS)]
    assert torch.equal(buffer, tensor[:, 8:])
