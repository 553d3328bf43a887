"""Boxes: rectangular pieces of a tensor, and whether a set of them covers it exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product


@dataclass(frozen=True)
class Box:
    """Elements [start[d], start[d] + shape[d]) in every dimension d of a tensor. A scalar is the box () of ()."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.start, self.shape, strict=True))

    def meets(self, other: Box) -> bool:
        pairs = zip(self.start, self.shape, other.start, other.shape, strict=True)
        return bool(self.elements and other.elements) and all(
            a < b + b_length and b < a + a_length for a, a_length, b, b_length in pairs
        )

    def fits(self, shape: Sequence[int]) -> bool:
        return len(self.start) == len(self.shape) == len(shape) and all(
            start >= 0 and length >= 0 and start + length <= full
            for start, length, full in zip(self.start, self.shape, shape, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{piece.start}:{piece.stop}" for piece in self.slices()) + "]"


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once; None when they do."""
    for box in boxes:
        if not box.fits(shape):
            return f"slice {box} lies outside the shape {list(shape)}"
    for first, second in combinations(boxes, 2):
        if first.meets(second):
            return f"slices {first} and {second} overlap: an element has two owners"
    given, wanted = sum(box.elements for box in boxes), math.prod(shape)
    if given != wanted:
        return (
            f"{wanted - given:,} of {wanted:,} elements have no owner (slices: {', '.join(map(str, boxes)) or 'none'})"
        )
    return None


def runs(box: Box, shape: Sequence[int], width: int) -> tuple[int, Iterator[int]]:
    """Where a box lies in the row-major tensor of `shape`, `width` bytes per element: (length, offsets).

    The elements of the box in row-major order are stretches of `length` bytes that start at `offsets`.
    """
    if not box.elements:
        return 0, iter(())
    strides = [math.prod(shape[d + 1 :]) * width for d in range(len(shape))]
    last = max((d for d, length in enumerate(box.shape) if length != shape[d]), default=0)
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    steps = [
        [index * stride for index in range(length)] for length, stride in zip(box.shape[:last], strides, strict=False)
    ]
    length = math.prod(box.shape[last:]) * width
    return length, (first + sum(step) for step in product(*steps))


def split(box: Box, most_elements: int) -> Iterator[Box]:
    """Cut a box across its first dimension that is longer than 1, in boxes of `most_elements` if one layer is no more."""
    d = next((d for d, length in enumerate(box.shape) if length > 1), None)
    if d is None or box.elements <= most_elements:
        yield box
        return
    layers = max(1, most_elements // (box.elements // box.shape[d]))
    for first in range(0, box.shape[d], layers):
        start = (*box.start[:d], box.start[d] + first, *box.start[d + 1 :])
        yield Box(start, (*box.shape[:d], min(layers, box.shape[d] - first), *box.shape[d + 1 :]))


def word_columns(box: Box, shape: Sequence[int], width: int) -> range | None:
    """Which 64-bit words of a row of the tensor of `shape`, `width` bytes per element, the box covers; a vector is one row.

    None when the row, or the box's share of it, is not made of whole words.
    """
    if not shape:
        return None
    begin, length, row = (elements * width for elements in (box.start[-1], box.shape[-1], shape[-1]))
    return None if (begin | length | row) % 8 else range(begin // 8, (begin + length) // 8)
