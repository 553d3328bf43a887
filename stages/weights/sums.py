"""Sums over the bytes of a tensor, by which an engine knows that what it holds is what the trainer published.

The 64-bit words of a tensor in rows (a vector is one row): each is multiplied by an odd factor of its column in the row, and all
products are added modulo 2^64. So the sums of parts add up to that of the whole, or of any rows, whoever made them in whatever
order. Any change of a single word changes the sum, and so do bytes of another version but for one chance in 2^64 or so. Rows in
another order are not seen: digests of the files are there for that, and the rehearsal of the engine's copies.
"""

from __future__ import annotations

import threading

import torch

from stages.weights.boxes import Box, word_columns

_SPREAD = 0x1E3779B97F4A7C15


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


class VersionSums:
    """The sums of a version's parts, made on the device and brought to the host together, behind everything else.

    Numbers are what `begin` counts from 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._parts: dict[int, PartSums] = {}  # by stream: one must not use factors that another one is about to make
        self._totals: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._values = torch.empty(0, dtype=torch.int64)
        self._arrived: torch.cuda.Event | None = None

    def clear(self) -> None:
        """Those that were begun so far are not read any more."""
        self._totals = []

    def begin(self, tensor: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int | None:
        """As `PartSums.of`, on the current stream; the number of the sum. Threads that begin sums at the same time need streams of
        their own."""
        stream = torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
        total = self._parts.setdefault(stream, PartSums()).of(tensor, box, shape)
        if total is None:
            return None
        with self._lock:
            self._totals.append(total)
            return len(self._totals) - 1

    def bring(self) -> None:
        """Let the current stream, which waits for those that made sums, copy them to the host."""
        if not self._totals:
            return
        stacked = torch.stack(self._totals)
        if not self._is_cuda:
            self._values = stacked
            return
        if len(self._values) < len(stacked):
            self._values = torch.empty(len(stacked), dtype=torch.int64, pin_memory=True)
        self._values[: len(stacked)].copy_(stacked, non_blocking=True)
        self._totals.append(stacked)  # another stream may have made it: its memory stays as it is until all is done
        self._arrived = torch.cuda.Event(blocking=True)
        self._arrived.record()

    def value(self, number: int) -> int:
        """Waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._values[number])


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """int64[n] of a contiguous tensor, which is copied when it does not begin at a word of its storage."""
    flat = tensor.reshape(-1)
    begin = flat.storage_offset() * flat.element_size()
    return (flat if begin % 8 == 0 and flat.data_ptr() % 8 == 0 else flat.clone()).view(torch.int64)
