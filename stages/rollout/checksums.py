"""The sums of `stages.weights.sums` over views of tensors, equal on the host and on any device, at the speed of memory.

For the question whether a copy arrived. Words are of 64 bits where the source and the target of the copy allow it, else narrower:
bytes are taken as integers in rows; the sum of each column is multiplied by the factor of the column, and all is added
modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_WORDS = (torch.int64, torch.int32, torch.int16)


def word_of(*views: torch.Tensor) -> torch.dtype:
    """The widest integer type as which all `views` (same shape and dtype) can be seen."""
    for word in _WORDS[:-1]:
        if all(_divides(word.itemsize, view) for view in views):
            return word
    return _WORDS[-1] if views[0].element_size() == 2 else torch.int32


def _divides(size: int, view: torch.Tensor) -> bool:
    """Of a view that is not contiguous in its last dimension a contiguous copy is summed up."""
    item = view.element_size()
    lengths = [int(view.shape[-1])]
    if view.stride(-1) == 1:
        lengths += [int(view.storage_offset()), *map(int, view.stride()[:-1])]
    return view.data_ptr() % size == 0 and all(length * item % size == 0 for length in lengths)


def as_words(view: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """[rows, words] of a tensor of at least one dimension."""
    if view.stride(-1) != 1 and view.shape[-1] > 1:
        view = view.contiguous()
    words = view.view(word)
    return words.reshape(-1, words.shape[-1])


def host_sum(view: torch.Tensor, word: torch.dtype, factors: torch.Tensor) -> int:
    """With numpy, which uses one thread and releases the interpreter's lock: the caller has threads of its own."""
    return _rows_sum(as_words(view, word).numpy(), factors.numpy())


def stretch_sum(words: Any, first: int, width: int, factors: Any) -> int:
    """The share of consecutive `words` (numpy) in the sum of a tensor whose rows have `width` words each.

    `first` is the place of the first in the tensor, counted in words. `wrapped` makes a sum of shares.
    """
    column = first % width
    head = min(-first % width, len(words))
    end = len(words) - (len(words) - head) % width
    total = 0
    if head:
        total += _rows_sum(words[:head].reshape(1, head), factors[column:])
    if head < end:
        total += _rows_sum(words[head:end].reshape(-1, width), factors)
    if end < len(words):
        total += _rows_sum(words[end:].reshape(1, len(words) - end), factors)
    return total


def _rows_sum(rows: Any, factors: Any) -> int:
    columns = np.add.reduce(rows, axis=0, dtype=np.int64)
    return int(np.add.reduce(columns * factors[: len(columns)]))


def device_sums(views: Sequence[torch.Tensor], words: Sequence[torch.dtype], factors: torch.Tensor) -> list[int]:
    """One kernel queue for all `views`, one transfer of the results; waits for everything queued before on the stream."""
    sums = []
    for view, word in zip(views, words, strict=True):
        columns = as_words(view, word).sum(dim=0, dtype=torch.int64)
        sums.append((columns * factors[: len(columns)]).sum())
    return [int(value) for value in torch.stack(sums).tolist()]
