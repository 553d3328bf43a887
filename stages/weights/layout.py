"""Where every tensor of a version goes, computed by all trainer ranks alike before a byte is written.

Pure: names, shapes, number formats and hosts in, file headers and offsets out. The files are what
`safetensors.save` would write for the same tensors, byte for byte (order, header, padding).
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stages.weights.boxes import Box, tiling_problem
from stages.weights.errors import PublishError
from stages.weights.manifest import DTYPE_BYTES

INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_MOST_FILES = 64
"""Of one version, as far as `max_file_bytes` allows: each costs a creation, and every reader an opening."""
_BYTES_WORTH_A_FILE = 128_000_000
_ORDER = {name: place for place, name in enumerate(reversed(DTYPE_BYTES))}  # safetensors sorts the widest format first


@dataclass(frozen=True)
class Slice:
    """What one rank owns of one tensor, without its data."""

    name: str
    dtype: str
    full_shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class Offer:
    """All that one rank owns, the host on which it runs, and how many threads write for it."""

    host: str
    slices: tuple[Slice, ...]
    threads: int = 1


@dataclass(frozen=True)
class Placement:
    """`offset` counts bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int


@dataclass(frozen=True)
class Layout:
    """`headers` maps file names to their first bytes, `sizes` to their lengths in bytes."""

    headers: dict[str, bytes]
    sizes: dict[str, int]
    tensors: dict[str, Placement]

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    def index(self) -> bytes | None:
        """HF's index of several weight files; None when there is one file, which needs none."""
        if len(self.headers) == 1:
            return None
        total = sum(math.prod(place.shape) * DTYPE_BYTES[place.dtype] for place in self.tensors.values())
        weight_map = {name: place.file for name, place in sorted(self.tensors.items())}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1).encode()


@dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    hosts: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def plan_layout(offers: Sequence[Offer], max_file_bytes: float) -> Layout:
    """Lay out what all ranks offer.

    Tensors written by different sets of hosts get different files: two NFS clients that write into one page can undo
    each other's bytes. Large versions get two files for each writing thread, since one thread at a time can write to a
    file; tensors that follow each other lie in different ones. No file exceeds `max_file_bytes` unless a single tensor
    does. Raises PublishError for tensors that are not covered exactly once.
    """
    groups: dict[tuple[str, ...], list[_Tensor]] = {}
    for tensor in _tensors(offers):
        groups.setdefault(tensor.hosts, []).append(tensor)
    if not groups:
        raise PublishError("no rank offers any tensor")
    writers = sum(offer.threads for offer in offers)
    contents = [part for hosts in sorted(groups) for part in _fill(groups[hosts], writers, max_file_bytes)]
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    places: dict[str, Placement] = {}
    for number, tensors in enumerate(contents, start=1):
        file = _SINGLE_FILE if len(contents) == 1 else f"model-{number:05d}-of-{len(contents):05d}.safetensors"
        headers[file] = header(tensors)
        offset = len(headers[file])
        for tensor in tensors:
            places[tensor.name] = Placement(tensor.dtype, tensor.shape, file, offset)
            offset += tensor.bytes
        sizes[file] = offset
    return Layout(headers, sizes, places)


def header(tensors: Iterable[_Tensor]) -> bytes:
    """Length (8 bytes, little endian) and JSON, padded with spaces to a multiple of 8. transformers wants `format`."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _tensors(offers: Sequence[Offer]) -> Iterator[_Tensor]:
    """Every tensor with the hosts that write it, in safetensors' order; raises PublishError for unsound slices."""
    owners: dict[str, list[tuple[str, Slice]]] = {}
    for offer in offers:
        for piece in offer.slices:
            owners.setdefault(piece.name, []).append((offer.host, piece))
    for name, owned in sorted(owners.items(), key=lambda item: (_ORDER[item[1][0][1].dtype], item[0])):
        first = owned[0][1]
        for _, piece in owned:
            if (piece.dtype, piece.full_shape) != (first.dtype, first.full_shape):
                raise PublishError(
                    f"tensor {name}: ranks disagree: {piece.dtype} {list(piece.full_shape)} and "
                    f"{first.dtype} {list(first.full_shape)}"
                )
        if problem := tiling_problem(first.full_shape, [piece.box for _, piece in owned]):
            raise PublishError(f"tensor {name} of shape {list(first.full_shape)}: {problem}")
        yield _Tensor(name, first.dtype, first.full_shape, tuple(sorted({host for host, _ in owned})))


def _fill(tensors: Sequence[_Tensor], writers: int, max_file_bytes: float) -> list[list[_Tensor]]:
    """Share ordered tensors among files of about one size: in the fewest that keep the limit and all writers busy."""
    total = sum(tensor.bytes for tensor in tensors)
    busy = min(2 * writers, _MOST_FILES, total // _BYTES_WORTH_A_FILE)
    number = max(1, busy, math.ceil(total / max_file_bytes))
    while (files := _shared_out(tensors, number, max_file_bytes)) is None:
        number += 1
    return [file for file in files if file]


def _shared_out(tensors: Sequence[_Tensor], number: int, max_file_bytes: float) -> list[list[_Tensor]] | None:
    """Each tensor to the file that has least, the largest tensors first; None when that breaks the limit."""
    files: list[list[int]] = [[] for _ in range(number)]
    filled = [(0, file) for file in range(number)]
    for place in sorted(range(len(tensors)), key=lambda place: (-tensors[place].bytes, place)):
        size, file = filled[0]
        if size and size + tensors[place].bytes > max_file_bytes:
            return None
        heapq.heapreplace(filled, (size + tensors[place].bytes, file))
        files[file].append(place)
    return [[tensors[place] for place in sorted(file)] for file in files]
