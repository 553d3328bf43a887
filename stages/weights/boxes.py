"""Boxes: rectangular pieces of a tensor, and whether a set of them covers it exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


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


def runs(box: Box, shape: Sequence[int], width: int) -> tuple[int, int, int, int]:
    """Where a box that is partial in at most one dimension lies in the row-major tensor of `width` bytes per element.

    Returns (first, length, stride, count): `count` pieces of `length` contiguous bytes, `stride` bytes apart.
    """
    partial = [d for d, length in enumerate(box.shape) if length != shape[d]]
    if not partial:
        return 0, box.elements * width, box.elements * width, 1
    if len(partial) > 1:
        raise ValueError(f"slice {box} of {list(shape)} is partial in {len(partial)} dimensions; one is supported")
    d = partial[0]
    inner = math.prod(shape[d + 1 :]) * width
    return box.start[d] * inner, box.shape[d] * inner, shape[d] * inner, math.prod(shape[:d])
