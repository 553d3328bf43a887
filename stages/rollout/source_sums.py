"""Checksums of the sources of all copies of one version: those that the trainer published, and what these leave.

A published sum is taken as it is (`stages.rollout.published_sums`): the trainer made it of its own parameters, so nothing on the way
from there to the engine can change bytes and sum alike. The others are added up by the threads that read, from cached bytes: a sum
is additive over rows, so every stretch of bytes that was just read and hashed gives its share. What cannot be summed up that way is
done when all is read, some rows at a time by several threads: sources that do not lie in one piece, sources that were read in pieces
that end within a word, and all of them when another process did the reading.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.rollout.checksums import as_words, host_sum, stretch_sum
from stages.rollout.copy_plan import Copy
from stages.rollout.published_sums import published_sum
from stages.weights.manifest import TensorEntry
from stages.weights.parallel import map_threads, thread_count
from stages.weights.sums import wrapped

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Source:
    """Of one copy. `flat` holds the words of a source that lies in one piece, from byte `first` of its tensor on; else it is None."""

    copy: Copy
    view: torch.Tensor
    word: torch.dtype
    first: int
    flat: Any

    @classmethod
    def of(cls, copy: Copy, tensor: torch.Tensor, word: torch.dtype) -> Source:
        view = copy.source.of(tensor)
        flat = as_words(view, word).reshape(-1).numpy() if view.is_contiguous() else None
        return cls(copy, view, word, copy.source.offset * view.element_size(), flat)

    @property
    def bytes(self) -> int:
        return self.view.numel() * self.view.element_size()

    @property
    def row_words(self) -> int:
        return int(self.view.shape[-1]) * self.view.element_size() // self.word.itemsize

    def blocks(self) -> list[tuple[int, int]]:
        """[begin, end) along the first dimension, of about 4 MB; one block for a vector, which is a single row."""
        if self.view.ndim == 1:
            return [(0, len(self.view))]
        rows = max(1, _BLOCK_BYTES * len(self.view) // self.bytes)
        return [(begin, min(begin + rows, len(self.view))) for begin in range(0, len(self.view), rows)]


class SourceSums:
    """`add` may be called by several threads at once; the other methods by one, when nothing is read.

    `sources` see the bytes of the version, `factors` are those of the columns. Sources that have a buffer in `gathered` are brought
    together there first. `entries` are those of the version's manifest; what has none has no published sum.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        factors: torch.Tensor,
        gathered: Mapping[int, torch.Tensor],
        entries: Mapping[str, TensorEntry],
    ) -> None:
        self._sources = sources
        self._published: dict[int, int] = {}
        self._by_name: dict[str, list[int]] = {}
        for index, source in enumerate(sources):
            entry = entries.get(source.copy.name)
            total = None if entry is None else published_sum(source.copy.source, source.word, entry)
            if total is not None:
                self._published[index] = total
            elif source.flat is not None:
                self._by_name.setdefault(source.copy.name, []).append(index)
        self._factors = factors
        self._gathered = gathered
        self._lock = threading.Lock()
        self.restart()

    @property
    def num_published(self) -> int:
        """How many sums are the trainer's."""
        return len(self._published)

    @property
    def wants_bytes(self) -> bool:
        """Whether there is anything to be summed up while it is read: else `add` need not be called."""
        return bool(self._by_name)

    def restart(self) -> None:
        """Forget what was added: the version is read anew."""
        self._sums = [self._published.get(index, 0) for index in range(len(self._sources))]
        self._late = {index for index, source in enumerate(self._sources) if source.flat is None}

    def add(self, name: str, first: int, length: int) -> None:
        """Bytes [first, first + length) of a tensor are in memory; every byte is reported once."""
        for index in self._by_name.get(name, ()):
            source = self._sources[index]
            begin = max(first - source.first, 0)
            end = min(first + length - source.first, source.bytes)
            if begin >= end:
                continue
            size = source.word.itemsize
            if begin % size or end % size:
                with self._lock:
                    self._late.add(index)
                continue
            share = stretch_sum(
                source.flat[begin // size : end // size], begin // size, source.row_words, self._factors.numpy()
            )
            with self._lock:
                self._sums[index] += share

    def complete(self, *, was_added: bool) -> list[int]:
        """The sum of each copy's source, int64; gathers what has a buffer. Unless `was_added`, all but published ones are
        summed up here."""
        late = self._late if was_added else set(range(len(self._sources))) - self._published.keys()
        jobs = [(index, *block) for index in sorted(late) for block in self._sources[index].blocks()]
        threads = thread_count(0, sum(self._sources[index].bytes for index in late))
        shares = map_threads(lambda job: self._block_sum(*job), jobs, threads)
        sums = [0 if index in late else value for index, value in enumerate(self._sums)]
        for (index, _, _), share in zip(jobs, shares, strict=True):
            sums[index] += share
        return [wrapped(value) for value in sums]

    def _block_sum(self, index: int, begin: int, end: int) -> int:
        source = self._sources[index]
        block = source.view[begin:end]
        if (buffer := self._gathered.get(index)) is not None:
            gathered = buffer[begin:end]
            np.copyto(as_words(gathered, source.word).numpy(), as_words(block, source.word).numpy())
            block = gathered
        return host_sum(block, source.word, self._factors)
