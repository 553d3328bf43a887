"""Sums over the bytes of a tensor, by which an engine knows that what it holds is what the trainer published.

The 64-bit words of a tensor in rows (a vector is one row): each is multiplied by an odd factor of its column in the row, and all
products are added modulo 2^64. So the sums of parts add up to that of the whole, or of any rows, whoever made them in whatever
order. Any change of a single word changes the sum, and so do bytes of another version but for one chance in 2^64 or so. Rows in
another order are not seen: digests of the files are there for that, and the rehearsal of the engine's copies.
"""

from __future__ import annotations

import torch

from stages.weights.boxes import Box, word_columns

_SPREAD = 0x1E3779B97F4A7C15
_BLOCK_SUMS = 4096


def column_factors(width: int, device: torch.device | None = None) -> torch.Tensor:
    """int64[width], all odd."""
    return (torch.arange(width, dtype=torch.int64, device=device) * _SPREAD) | 1


def wrapped(total: int) -> int:
    """Modulo 2^64, as int64."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


class PartSums:
    """Makes the sums of parts of tensors, each on the tensor's device and without waiting for it."""

    def __init__(self) -> None:
        self._factors = column_factors(0)

    def of(self, tensor: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor | None:
        """int64[] for the part `box` of a tensor of `shape`; `tensor` (contiguous, of the box's shape) holds its elements.

        None when the rows, or the part's share of them, are not made of whole words.
        """
        columns = word_columns(box, shape, tensor.element_size())
        if columns is None:
            return None
        if not box.elements:
            return torch.zeros((), dtype=torch.int64, device=tensor.device)
        words = _words(tensor).view(-1, len(columns))
        return (words.sum(dim=0) * self._of_columns(columns, tensor.device)).sum()

    def _of_columns(self, columns: range, device: torch.device) -> torch.Tensor:
        if self._factors.device != device or len(self._factors) < columns.stop:
            self._factors = column_factors(columns.stop, device)
        return self._factors[columns.start : columns.stop]


class HostSums:
    """Sums on their way into host memory (pinned for a GPU), which the next version uses again."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._parts = PartSums()
        self._blocks: list[torch.Tensor] = []
        self._taken = 0

    def clear(self) -> None:
        """Those that were begun so far are not read any more."""
        self._taken = 0

    def begin(self, tensor: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor | None:
        """As `PartSums.of`, but in host memory: there once the current stream has done what it was given."""
        total = self._parts.of(tensor, box, shape)
        return None if total is None else self._place().copy_(total, non_blocking=True)

    def _place(self) -> torch.Tensor:
        block, index = divmod(self._taken, _BLOCK_SUMS)
        if block == len(self._blocks):
            self._blocks.append(torch.empty(_BLOCK_SUMS, dtype=torch.int64, pin_memory=self._pinned))
        self._taken += 1
        return self._blocks[block][index]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """int64[n] of a contiguous tensor, which is copied when it does not begin at a word of its storage."""
    flat = tensor.reshape(-1)
    begin = flat.storage_offset() * flat.element_size()
    return (flat if begin % 8 == 0 and flat.data_ptr() % 8 == 0 else flat.clone()).view(torch.int64)
