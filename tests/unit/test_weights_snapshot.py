"""Copies of a version in host memory: in which order they are made, and how their end is heard of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.weights.boxes import Box
from stages.weights.snapshot import Copier, Piece, pieces, woven
from stages.weights.tensors import LocalTensor

LARGE, SMALL = 1 << 19, (1 << 19) - 1


def owned(sizes: list[int]) -> list[LocalTensor]:
    """Vectors of so many elements, named by their numbers; all share one element's memory."""
    return [LocalTensor.whole(str(number), torch.zeros(1).expand(size)) for number, size in enumerate(sizes)]


@given(st.lists(st.sampled_from([LARGE, SMALL, 2, 40 << 20]), max_size=60))
def test_weaving_keeps_all_pieces_and_the_order_of_those_of_large_tensors(sizes: list[int]) -> None:
    tensors = owned(sizes)
    plain = [(piece.name, piece.box) for local in tensors for piece in pieces(local, "F32")]

    found = [(piece.name, piece.box) for piece in woven(tensors, "F32")]

    assert sorted(found, key=lambda piece: (int(piece[0]), piece[1].start)) == plain
    assert [p for p in found if sizes[int(p[0])] >= LARGE] == [p for p in plain if sizes[int(p[0])] >= LARGE]


@given(st.integers(2, 40), st.integers(0, 80))
def test_weaving_leaves_no_small_tensor_for_the_last_third(num_large: int, num_small: int) -> None:
    found = [piece.box.elements for piece in woven(owned([LARGE] * num_large + [SMALL] * num_small), "F32")]

    assert found[:2] == [LARGE, SMALL if num_small else LARGE]
    last_small = max((number for number, elements in enumerate(found) if elements == SMALL), default=0)
    assert found[last_small:].count(LARGE) >= num_large // 3


def test_a_copy_that_fails_is_heard_of_when_all_are_waited_for() -> None:
    with ThreadPoolExecutor(1) as pool:
        copier = Copier(torch.device("cpu"), pool)
        broken = Piece("a", (4,), "F32", Box((0,), (4,)), torch.zeros(5))  # five elements do not fit into four
        with copier.copying():
            copier.copy(broken)

        with pytest.raises(RuntimeError, match="size"):
            copier.complete()
        copier.wait()
