"""Copies of a version in host memory: in which order they are made, and how their end is heard of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.weights.boxes import Box
from stages.weights.snapshot import Copier, Piece, woven

LARGE, SMALL = 1 << 20, (1 << 20) - 4


def a_piece(name: str, num_bytes: int) -> Piece:
    """Of no memory: only its length is looked at."""
    words = torch.empty(0)
    return Piece(name, (num_bytes // 4,), "F32", Box((0,), (num_bytes // 4,)), words)


@given(st.lists(st.sampled_from([LARGE, SMALL, 8, 64 << 20]), max_size=60))
def test_weaving_keeps_all_pieces_and_the_order_of_the_large_ones(sizes: list[int]) -> None:
    pieces = [a_piece(str(number), size) for number, size in enumerate(sizes)]

    found = woven(pieces)

    assert sorted(found, key=lambda piece: int(piece.name)) == pieces
    assert [p for p in found if p.num_bytes >= LARGE] == [p for p in pieces if p.num_bytes >= LARGE]


@given(st.integers(2, 40), st.integers(0, 80))
def test_weaving_leaves_no_small_piece_for_the_last_third(num_large: int, num_small: int) -> None:
    pieces = [a_piece("large", LARGE)] * num_large + [a_piece("small", SMALL)] * num_small

    found = woven(pieces)

    assert [piece.name for piece in found[:2]] == ["large", "small" if num_small else "large"]
    last_small = max((number for number, piece in enumerate(found) if piece.name == "small"), default=0)
    assert sum(piece.name == "large" for piece in found[last_small:]) >= num_large // 3


def test_a_copy_that_fails_is_heard_of_when_all_are_waited_for() -> None:
    with ThreadPoolExecutor(1) as pool:
        copier = Copier(torch.device("cpu"), pool)
        broken = Piece("a", (4,), "F32", Box((0,), (4,)), torch.zeros(5))  # five elements do not fit into four
        with copier.copying():
            copier.copy(broken)

        with pytest.raises(RuntimeError, match="size"):
            copier.complete()
        copier.wait()
