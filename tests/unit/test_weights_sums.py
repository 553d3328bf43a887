"""Sums that the trainer makes of parts are those that the engine makes of what it holds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stages.rollout.checksums import device_sums, host_sum
from stages.rollout.copy_plan import View
from stages.rollout.published_sums import published_sum
from stages.rundir import RunDir
from stages.weights.boxes import Box
from stages.weights.errors import RecordError
from stages.weights.manifest import DTYPE_BYTES, Manifest, Part, TensorEntry
from stages.weights.reader import load_manifest
from stages.weights.sums import PartSums, VersionSums, column_factors, wrapped
from stages.weights.tensors import TORCH_DTYPES
from tests.delta_kit import publish_next, sparse_publisher
from tests.engine_kit import part_sums_on_the_host, with_sums
from tests.weights_kit import publish_full, small_tensors

FACTORS = column_factors(4096)


def cuts(data: st.DataObject, length: int, step: int) -> list[tuple[int, int]]:
    """[begin, end) of pieces of a dimension, cut at multiples of `step`; some may be empty."""
    places = data.draw(st.lists(st.integers(0, length // step), max_size=3))
    ends = sorted([0, length, *(place * step for place in places)])
    return list(pairwise(ends))


def boxes(data: st.DataObject, shape: tuple[int, ...], columns_of_a_word: int) -> Iterator[Box]:
    rows = cuts(data, shape[0], 1) if len(shape) > 1 else [(0, 0)]
    for first, last in rows:
        for left, right in cuts(data, shape[-1], columns_of_a_word):
            if len(shape) == 1:
                yield Box((left,), (right - left,))
            else:
                inner = shape[1:-1]
                yield Box((first, *(0 for _ in inner), left), (last - first, *inner, right - left))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(1,), (7,), (5, 1), (1, 4), (6, 3), (3, 2, 2)]),
    dtype=st.sampled_from(["F32", "BF16", "F16"]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_sums_of_any_parts_add_up_to_what_the_engine_finds(
    shape: tuple[int, ...], dtype: str, seed: int, data: st.DataObject
) -> None:
    elements = 8 // DTYPE_BYTES[dtype]
    shape = (*shape[:-1], shape[-1] * elements)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TORCH_DTYPES[dtype])
    sums, total = PartSums(), 0

    for box in boxes(data, shape, elements):
        part = sums.of(tensor[box.slices()].contiguous(), box, shape)
        assert part is not None
        total += int(part)

    assert [wrapped(total)] == [host_sum(tensor, torch.int64, FACTORS)]
    assert [wrapped(total)] == device_sums([tensor.clone()], [torch.int64], FACTORS)


@pytest.mark.parametrize(
    "shape, box, dtype",
    [
        ((), Box((), ()), torch.float32),
        ((3,), Box((0,), (3,)), torch.float32),
        ((5, 6), Box((0, 0), (5, 6)), torch.bfloat16),
        ((5, 8), Box((0, 0), (5, 2)), torch.bfloat16),
        ((5, 8), Box((0, 2), (5, 4)), torch.bfloat16),
        ((5, 9), Box((0, 0), (5, 8)), torch.float16),
    ],
)
def test_what_is_not_made_of_whole_words_has_no_sum(shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> None:
    assert PartSums().of(torch.ones(box.shape, dtype=dtype), box, shape) is None


@pytest.mark.parametrize("offset", range(5))
def test_a_part_that_begins_within_a_word_of_its_memory_has_the_same_sum(offset: int) -> None:
    """A trainer's parameters may lie anywhere in one large buffer."""
    values = torch.randn(6, 8).bfloat16()
    memory = torch.zeros(60, dtype=torch.bfloat16)
    placed = memory[offset : offset + 48].copy_(values.view(-1)).view(6, 8)
    box = Box((0, 0), (6, 8))

    found, wanted = (PartSums().of(tensor, box, (6, 8)) for tensor in (placed, values))

    assert found is not None
    assert wanted is not None
    assert int(found) == int(wanted)


def test_sums_of_a_version_are_brought_together_and_are_those_of_the_next_after_it() -> None:
    sums = VersionSums(torch.device("cpu"))
    tensors = [torch.full((2, 4), float(number)) for number in range(8)]
    box = Box((0, 0), (2, 4))

    assert [sums.begin(tensor, box, (2, 4)) for tensor in tensors] == list(range(8))
    assert sums.begin(torch.zeros(3), Box((0,), (3,)), (3,)) is None
    sums.bring()
    assert [sums.value(number) for number in range(8)] == [host_sum(tensor, torch.int64, FACTORS) for tensor in tensors]

    sums.clear()
    assert sums.begin(tensors[5], box, (2, 4)) == 0
    sums.bring()
    assert sums.value(0) == host_sum(tensors[5], torch.int64, FACTORS)


# ---- which of them an engine can use -----------------------------------------------------------------------------------


def entry_of(tensor: torch.Tensor, parts: list[Box], *, without: int = -1) -> TensorEntry:
    """As published in `parts`; that of number `without` has no sum."""
    shape, sums = tuple(tensor.shape), PartSums()
    made = []
    for number, box in enumerate(parts):
        total = sums.of(tensor[box.slices()].contiguous(), box, shape)
        made.append(Part(box.start, box.shape, "0" * 32, None if number == without or total is None else int(total)))
    return TensorEntry.of("F32", shape, "model.safetensors", 8, made)


THREE = [Box((0, 0), (2, 8)), Box((2, 0), (4, 4)), Box((2, 4), (4, 4)), Box((6, 0), (0, 8))]
"""Rows 0 and 1, both halves of rows 2 to 5, and nothing."""


@pytest.mark.parametrize("first, rows", [(0, 6), (0, 2), (2, 4)])
def test_rows_that_parts_cover_exactly_have_the_sum_of_these(first: int, rows: int) -> None:
    tensor = torch.randn(6, 8)
    source = View((rows, 8), (8, 1), first * 8)

    total = published_sum(source, torch.int64, entry_of(tensor, THREE))

    assert total == host_sum(source.of(tensor), torch.int64, FACTORS)


@pytest.mark.parametrize(
    "source, word, without",
    [
        (View((6, 8), (8, 1), 0), torch.int32, -1),
        (View((3, 8), (8, 1), 0), torch.int64, -1),
        (View((1, 8), (8, 1), 3 * 8), torch.int64, -1),
        (View((6, 4), (8, 1), 0), torch.int64, -1),
        (View((8, 6), (1, 8), 0), torch.int64, -1),
        (View((3, 8), (16, 1), 0), torch.int64, -1),
        (View((12, 4), (4, 1), 0), torch.int64, -1),
        (View((2, 8), (8, 1), 4), torch.int64, -1),
        (View((48,), (1,), 0), torch.int64, -1),
        (View((6, 8), (8, 1), 0), torch.int64, 1),
    ],
)
def test_the_trainers_sums_are_not_used_for_anything_else(source: View, word: torch.dtype, without: int) -> None:
    assert published_sum(source, word, entry_of(torch.randn(6, 8), THREE, without=without)) is None


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=st.sampled_from([(8,), (6, 4), (3, 2, 4)]), seed=st.integers(0, 99))
def test_whatever_view_has_a_published_sum_has_the_one_that_the_engine_finds(
    data: st.DataObject, shape: tuple[int, ...], seed: int
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    entry = entry_of(tensor, [box for box in boxes(data, shape, 2) if box.elements])
    view = data.draw(views(tensor))

    total = published_sum(view, torch.int64, entry)

    if total is not None:
        target = torch.empty(view.shape).copy_(view.of(tensor))
        assert total == host_sum(target, torch.int64, FACTORS)


@st.composite
def views(draw: st.DrawFn, tensor: torch.Tensor) -> View:
    """Any elements of the tensor; often rows of it."""
    width = tensor.shape[-1]
    rows = tensor.numel() // width
    if draw(st.booleans()):
        first = draw(st.integers(0, rows - 1))
        return View((draw(st.integers(1, rows - first)), width), (width, 1), first * width)
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    stride = [draw(st.integers(0, width + 1)) for _ in shape[1:]] + [1]
    shape[-1] = draw(st.sampled_from([2, 4, width]))
    last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    assume(last < tensor.numel())
    return View(tuple(shape), tuple(stride), draw(st.integers(0, tensor.numel() - last - 1)))


def test_vectors_and_single_rows_and_experts_have_published_sums() -> None:
    tensor = torch.randn(4, 3, 8)
    parts = [Box((number, 0, 0), (1, 3, 8)) for number in range(4)]
    entry = entry_of(tensor, parts)
    vector = torch.randn(8)

    assert published_sum(View((3, 8), (8, 1), 24), torch.int64, entry) == host_sum(tensor[1], torch.int64, FACTORS)
    assert published_sum(View((2, 3, 8), (24, 8, 1), 24), torch.int64, entry) == host_sum(
        tensor[1:3], torch.int64, FACTORS
    )
    assert published_sum(View((8,), (1,), 0), torch.int64, entry_of(vector, [Box((0,), (8,))])) == host_sum(
        vector, torch.int64, FACTORS
    )
    assert published_sum(View((4,), (1,), 4), torch.int64, entry_of(vector, [Box((0,), (8,))])) is None


# ---- in the manifest ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def record_of(manifest: Manifest) -> dict[str, Any]:
    return json.loads(json.dumps(manifest.to_record()))  # type: ignore[no-any-return]


def test_a_manifest_without_sums_has_no_field_for_them(run: RunDir) -> None:
    record = record_of(publish_full(run, 1))

    assert all("sum64" not in part for entry in record["tensors"].values() for part in entry["parts"])


def test_sums_are_part_of_the_manifests_digest_but_not_of_its_tensors(run: RunDir) -> None:
    tensors = small_tensors(1)
    plain = publish_full(run, 1, tensors)
    summed = with_sums(plain, tensors)

    assert Manifest.from_record(record_of(summed)) == summed
    assert summed.digest != plain.digest
    assert {name: entry.xxh3_128 for name, entry in summed.tensors.items()} == {
        name: entry.xxh3_128 for name, entry in plain.tensors.items()
    }


def test_the_digest_of_a_tensor_of_several_parts_does_not_depend_on_sums() -> None:
    with_all, without_one = (entry_of(torch.ones(6, 8), THREE, without=number) for number in (-1, 1))

    assert with_all != without_one
    assert with_all.xxh3_128 == without_one.xxh3_128


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, 1.0, "1", None, True])
def test_a_sum_that_is_no_64_bit_integer_is_refused(run: RunDir, value: Any) -> None:
    record = record_of(publish_full(run, 1))
    record["tensors"]["model.embed"]["parts"][0]["sum64"] = value

    with pytest.raises(RecordError, match="sum64"):
        Manifest.from_record(record)


def test_a_sum_where_there_can_be_none_is_refused(run: RunDir) -> None:
    record = record_of(publish_full(run, 1))
    record["tensors"]["model.scale"]["parts"][0]["sum64"] = 5

    with pytest.raises(RecordError, match="not made of whole 64-bit words"):
        Manifest.from_record(record)


def test_another_sum_than_the_manifest_was_made_with_is_refused(run: RunDir) -> None:
    tensors = small_tensors(1)
    record = record_of(with_sums(publish_full(run, 1, tensors), tensors))
    record["tensors"]["model.embed"]["parts"][0]["sum64"] += 1

    with pytest.raises(RecordError, match="digest"):
        Manifest.from_record(record)


# ---- published -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_copies_are_published_in_full_and_with_deltas(
    run: RunDir, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_sums_on_the_host(monkeypatch)
    tensors = small_tensors(0)
    with sparse_publisher(run, dtype=dtype) as publisher:
        for version in range(3):
            tensors["model.embed"][version, 1] += 1.0
            manifest = load_manifest(run, version, publish_next(publisher, version, tensors).digest)
            read = {name: tensor.to(TORCH_DTYPES[manifest.tensors[name].dtype]) for name, tensor in tensors.items()}

            assert with_sums(manifest, read) == manifest
            assert (manifest.delta is not None) == (version > 0)


def test_on_a_host_nobody_makes_sums(run: RunDir) -> None:
    tensors = small_tensors(0)
    with sparse_publisher(run) as publisher:
        manifests = [publish_next(publisher, 0, tensors, lend=True), publish_next(publisher, 1, tensors)]

    parts = [part for manifest in manifests for entry in manifest.tensors.values() for part in entry.parts]
    assert {part.sum64 for part in parts} == {None}


def test_threads_that_begin_sums_at_the_same_time_get_numbers_of_their_own() -> None:
    """One orders conversions and their sums while another sums up what needs none."""

    class Slow(list[torch.Tensor]):
        def append(self, total: torch.Tensor) -> None:
            super().append(total)
            both_are_in.wait(0.2)  # unless the second may not come in

    both_are_in, found = threading.Event(), VersionSums(torch.device("cpu"))
    tensors = [torch.arange(4, dtype=torch.float64) + number for number in range(2)]
    box = Box((0,), (4,))
    found._totals = Slow()

    def begin(number: int) -> int | None:
        place = found.begin(tensors[number], box, (4,))
        both_are_in.set()
        return place

    with ThreadPoolExecutor(2) as pool:
        numbers = list(pool.map(begin, range(2)))
    found.bring()

    assert sorted(number for number in numbers if number is not None) == [0, 1]
    wanted = [PartSums().of(tensor, box, (4,)) for tensor in tensors]
    assert [found.value(number) for number in numbers if number is not None] == [
        int(total) for total in wanted if total is not None
    ]
