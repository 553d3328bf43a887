"""What one rank's tensors have that the version before had not, by a few threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial

from stages.weights.boxes import Box
from stages.weights.delta import Delta, encode
from stages.weights.delta_chain import MOST_SHARE
from stages.weights.delta_entry import DeltaPart
from stages.weights.layout import Offer
from stages.weights.manifest import DTYPE_BYTES, FileEntry, Manifest, Part, xxh3_128
from stages.weights.parallel import Lanes
from stages.weights.snapshot import Copy, Piece
from stages.weights.tensors import Bytes
from stages.weights.writer import Written

_FILE_BYTES = 64 << 20
"""A payload file is closed when it has so many: each is written, and read, by one thread at a time."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's bytes of a version that was published, with the offers of all ranks; `pieces` by tensor and box."""

    manifest: Manifest
    offers: Sequence[Offer]
    pieces: Mapping[tuple[str, Box], Bytes]

    @property
    def links(self) -> int:
        """How many deltas in a row lead to it."""
        return 0 if self.manifest.delta is None else self.manifest.delta.links


@dataclass(frozen=True)
class _Encoded:
    """`change` is None when the part has the base's bytes."""

    name: str
    part: Part
    copy: Copy
    change: tuple[Delta, bytes] | None


@dataclass(frozen=True)
class Payloads:
    """What a rank contributes to a delta: all its parts, the payloads of those that changed, and the files of these."""

    parts: Written = field(default_factory=list)
    changes: list[tuple[str, DeltaPart]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def entries(self) -> dict[str, FileEntry]:
        """Payloads have digests of their own, so the files need none."""
        return {name: FileEntry(len(data), 0, xxh3_128(b"")) for name, data in self.files.items()}


class RankEncoder:
    """Compares each piece of one rank with that of the version before, as soon as its copy is in host memory.

    Payloads stay in memory; encoding ends early once they are too many for a delta, whatever other ranks have.
    """

    def __init__(self) -> None:
        self._lanes: Lanes[_Encoded | None] = Lanes(())
        self._workers: list[Future[list[_Encoded | None]]] = []
        self._digests: dict[tuple[str, Box], str] = {}
        self._most_bytes = 0
        self._bytes = 0
        self._lock = threading.Lock()

    def start(
        self, base: Snapshot, copies: Sequence[tuple[Piece, Copy]], pool: ThreadPoolExecutor, threads: int
    ) -> None:
        self._digests = {
            (name, part.box): part.xxh3_128 for name, entry in base.manifest.tensors.items() for part in entry.parts
        }
        self._most_bytes = int(MOST_SHARE * base.manifest.weight_bytes)
        self._lanes = Lanes(
            [
                (number, piece.num_bytes, partial(self._encode, base, piece, copy))
                for number, (piece, copy) in enumerate(copies)
            ]
        )
        self._workers = self._lanes.start(pool, threads)

    def payload_bytes(self) -> int:
        """Waits for all; more than can be worth a delta when encoding ended early. Raises the first error."""
        for worker in self._workers:
            worker.result()
        return self._bytes

    def payloads(self, rank: int, most_file_bytes: float) -> Payloads:
        """All of them, when encoding did not end early."""
        done = [encoded for worker in self._workers for encoded in worker.result() if encoded is not None]
        done.sort(key=lambda encoded: (encoded.name, encoded.part.start))
        packer = _Packer(rank, min(_FILE_BYTES, most_file_bytes))
        changes = [
            (encoded.name, packer.add(encoded.part.start, *encoded.change)) for encoded in done if encoded.change
        ]
        parts = [(encoded.name, replace(encoded.part, sum64=encoded.copy.sum64())) for encoded in done]
        return Payloads(parts, changes, packer.files())

    def close(self) -> None:
        """Begin no further piece, wait for those under way, forget all."""
        self._lanes.stop()
        wait(self._workers)
        self._lanes, self._workers, self._digests = Lanes(()), [], {}

    def _encode(self, base: Snapshot, piece: Piece, copy: Copy) -> _Encoded | None:
        if self._bytes > self._most_bytes:
            return None
        data, key = copy.bytes(), (piece.name, piece.box)
        digests = (self._digests[key], xxh3_128(data))
        part = Part(piece.box.start, piece.box.shape, digests[1])
        if digests[0] == digests[1]:
            return _Encoded(piece.name, part, copy, None)
        change = encode(base.pieces[key], data, DTYPE_BYTES[piece.dtype], digests=digests)
        with self._lock:
            self._bytes += len(change[1])
        return _Encoded(piece.name, part, copy, change)


class _Packer:
    """Payloads one behind the other, in files of about `most_bytes`."""

    def __init__(self, rank: int, most_bytes: float) -> None:
        self._rank, self._most_bytes = rank, most_bytes
        self._contents: list[list[bytes]] = []
        self._filled = 0

    def add(self, start: tuple[int, ...], delta: Delta, payload: bytes) -> DeltaPart:
        if not self._contents or self._filled + len(payload) > self._most_bytes:
            self._contents.append([])
            self._filled = 0
        self._contents[-1].append(payload)
        self._filled += len(payload)
        return DeltaPart(start, self._name(len(self._contents)), self._filled - len(payload), delta)

    def files(self) -> dict[str, bytes]:
        return {self._name(number): b"".join(parts) for number, parts in enumerate(self._contents, start=1)}

    def _name(self, number: int) -> str:
        return f"delta-{self._rank + 1:05d}-{number:05d}.bin"
