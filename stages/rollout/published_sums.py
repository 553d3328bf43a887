"""Which sums of sources the trainer has made already, and published in the manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stages.rollout.copy_plan import View
from stages.weights.boxes import Box
from stages.weights.manifest import Manifest, TensorEntry
from stages.weights.sums import wrapped


def has_sums(manifest: Manifest) -> bool:
    """Has the trainer made sums of this version? Where it could: not of rows that are no whole number of words."""
    return any(part.sum64 is not None for entry in manifest.tensors.values() for part in entry.parts)


def published_sum(source: View, word: torch.dtype, entry: TensorEntry) -> int | None:
    """The sum (int64) of `source`, a view of the tensor of `entry`, by words of type `word`.

    None unless the source is rows of the tensor, whole and in their order, made of 64-bit words, and of just those rows all parts
    have a sum: the words of a part of a row have the factors of that row.
    """
    width = entry.shape[-1] if entry.shape else 0
    if word != torch.int64 or not width or not _is_rows(source, width):
        return None
    left = math.prod(source.shape)
    rows, total = range(source.offset // width, (source.offset + left) // width), 0
    for part in entry.parts:
        first, last = _rows(part.box, entry.shape)
        if not part.box.elements or last < rows.start or first >= rows.stop:
            continue
        if part.sum64 is None or first < rows.start or last >= rows.stop:
            return None
        total += part.sum64
        left -= part.box.elements
    return wrapped(total) if left == 0 else None


def _is_rows(source: View, width: int) -> bool:
    stride = 1
    for length, found in zip(reversed(source.shape), reversed(source.stride), strict=True):
        if length != 1 and found != stride:
            return False
        stride *= length
    return source.shape[-1] == width and source.offset % width == 0


def _rows(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """The first and the last row that a box has elements of; rows are counted over all dimensions but the last."""
    first = last = 0
    for start, length, full in zip(box.start[:-1], box.shape[:-1], shape[:-1], strict=True):
        first, last = first * full + start, last * full + start + length - 1
    return first, last
