"""Layout of a version: slices cover tensors exactly, files are safetensors' own, computed alike on every rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.weights.boxes import Box, runs, split, tiling_problem
from stages.weights.errors import PublishError
from stages.weights.layout import Offer, Slice, plan_layout

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


def whole(name: str, shape: tuple[int, ...], dtype: str = "F32") -> Slice:
    return Slice(name, dtype, shape, Box((0,) * len(shape), shape))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box, partial in any number of dimensions, or empty."""
    cuts = [sorted((draw(st.integers(0, full)), draw(st.integers(0, full)))) for full in shape]
    return Box(tuple(first for first, _ in cuts), tuple(last - first for first, last in cuts))


@given(shape=SHAPES, data=st.data())
def test_runs_of_a_box_are_the_bytes_that_numpy_slices(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = data.draw(boxes_in(shape))
    full = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)

    length, offsets = runs(box, shape, 2)
    raw = full.tobytes()
    pieces = b"".join(raw[offset : offset + length] for offset in offsets)

    assert pieces == full[box.slices()].tobytes()


def test_whole_rows_are_one_run() -> None:
    length, offsets = runs(Box((2, 0), (3, 4)), (8, 4), 2)

    assert (length, list(offsets)) == (24, [16])


@given(shape=SHAPES, most=st.integers(1, 30), data=st.data())
def test_a_box_is_split_without_gap_or_overlap(shape: tuple[int, ...], most: int, data: st.DataObject) -> None:
    box = data.draw(boxes_in(shape))

    parts = list(split(box, most))

    counts = np.zeros(shape, dtype=int)
    for part in parts:
        counts[part.slices()] += 1
    wanted = np.zeros(shape, dtype=int)
    wanted[box.slices()] = 1
    assert (counts == wanted).all()
    layer = box.elements // next((length for length in box.shape if length > 1), 1)
    assert all(part.elements <= max(most, layer) for part in parts)


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


def test_a_large_version_gives_every_thread_files_of_its_own() -> None:
    layers = [whole(f"layers.{number:02d}.up", (1_000, 40_000)) for number in range(32)]  # 160 MB each

    layout = plan_layout([Offer("a", tuple(layers), threads=4)], 4e9)

    assert len(layout.headers) == 8
    neighbours = [layout.tensors[f"layers.{number:02d}.up"].file for number in range(8)]
    assert len(set(neighbours)) == 8, "tensors that are copied one after the other are written at the same time"
    assert max(layout.sizes.values()) < 1.01 * min(layout.sizes.values())
