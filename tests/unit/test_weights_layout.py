"""Layout of a version: slices cover tensors exactly, files are safetensors' own, computed alike on every rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.weights.boxes import Box, runs, tiling_problem
from stages.weights.errors import PublishError
from stages.weights.layout import Offer, Slice, plan_layout

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


def whole(name: str, shape: tuple[int, ...], dtype: str = "F32") -> Slice:
    return Slice(name, dtype, shape, Box((0,) * len(shape), shape))


@given(shape=SHAPES, data=st.data())
def test_pieces_of_a_box_are_the_bytes_that_numpy_slices(shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, max(0, len(shape) - 1)))
    start = data.draw(st.integers(0, shape[dim] - 1)) if shape else 0
    length = data.draw(st.integers(1, shape[dim] - start)) if shape else 0
    box = Box(
        tuple(start if d == dim else 0 for d in range(len(shape))),
        tuple(length if d == dim else full for d, full in enumerate(shape)),
    )
    full = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)

    first, size, stride, count = runs(box, shape, 2)
    raw = full.tobytes()
    pieces = b"".join(raw[first + row * stride : first + row * stride + size] for row in range(count))

    assert pieces == full[box.slices()].tobytes()


def test_a_box_partial_in_two_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="partial in 2 dimensions"):
        runs(Box((0, 0), (1, 1)), (2, 2), 4)


@pytest.mark.parametrize(
    "boxes, problem",
    [
        ([Box((0, 0), (2, 3)), Box((2, 0), (2, 3))], None),
        ([Box((0, 0), (4, 1)), Box((0, 1), (4, 2))], None),
        ([Box((0, 0), (2, 3))], "6 of 12 elements have no owner"),
        ([Box((0, 0), (4, 3)), Box((1, 0), (1, 3))], "overlap"),
        ([Box((0, 0), (4, 4))], "outside the shape"),
        ([Box((0,), (12,))], "outside the shape"),
        ([], "12 of 12 elements have no owner"),
    ],
)
def test_every_element_needs_exactly_one_owner(boxes: list[Box], problem: str | None) -> None:
    found = tiling_problem((4, 3), boxes)

    assert (found is None) if problem is None else (found is not None and problem in found)


def test_a_tensor_nobody_completes_is_named() -> None:
    half = Slice("lm_head.weight", "F32", (4, 2), Box((0, 0), (2, 2)))

    with pytest.raises(PublishError, match=r"lm_head\.weight of shape \[4, 2\]: 4 of 8 elements have no owner"):
        plan_layout([Offer("a", (half,)), Offer("a", ())], 1e9)


def test_ranks_that_disagree_on_a_shape_are_refused() -> None:
    with pytest.raises(PublishError, match="norm: ranks disagree"):
        plan_layout([Offer("a", (whole("norm", (2,)),)), Offer("a", (whole("norm", (3,)),))], 1e9)


def test_a_layout_needs_tensors() -> None:
    with pytest.raises(PublishError, match="no rank offers"):
        plan_layout([Offer("a", ()), Offer("b", ())], 1e9)


def test_one_file_needs_no_index() -> None:
    layout = plan_layout([Offer("a", (whole("x", (2,)), whole("y", (3,))))], 1e9)

    assert list(layout.headers) == ["model.safetensors"]
    assert layout.index() is None


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), limit=st.integers(40, 200))
def test_no_file_exceeds_the_limit_unless_one_tensor_does(sizes: list[int], limit: int) -> None:
    layout = plan_layout([Offer("a", tuple(whole(f"t{i:02d}", (n,)) for i, n in enumerate(sizes)))], limit)

    contents: dict[str, list[int]] = {}
    for place in layout.tensors.values():
        contents.setdefault(place.file, []).append(4 * math.prod(place.shape))
    assert all(sum(content) <= limit or len(content) == 1 for content in contents.values())


def test_hosts_do_not_share_files_unless_they_share_a_tensor() -> None:
    upper = Slice("both", "F32", (4,), Box((0,), (2,)))
    lower = Slice("both", "F32", (4,), Box((2,), (2,)))
    layout = plan_layout(
        [
            Offer("h1", (whole("a", (2,)), upper)),
            Offer("h2", (whole("b", (2,)), lower)),
            Offer("h1", (whole("c", (2,)),)),
        ],
        1e9,
    )

    files = {name: place.file for name, place in layout.tensors.items()}
    assert files["a"] == files["c"]
    assert len({files["a"], files["b"], files["both"]}) == 3


@given(order=st.permutations(range(5)))
def test_the_layout_does_not_depend_on_who_offers_what_first(order: list[int]) -> None:
    offers = [Offer(f"h{i % 2}", (whole(f"t{i}", (i + 1, 2)),)) for i in range(5)]

    assert plan_layout([offers[i] for i in order], 30) == plan_layout(offers, 30)
