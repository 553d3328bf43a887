"""One version on its way from the trainer ranks into its folder; made by `stages.weights.publish.Publisher`."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stages.publication import Publication as FolderPublication
from stages.weights import spares
from stages.weights.boxes import runs
from stages.weights.collect import sweep_leftovers
from stages.weights.delta_chain import is_worth_it
from stages.weights.delta_entry import DeltaEntry, DeltaPart
from stages.weights.encoder import Payloads, RankEncoder, Snapshot
from stages.weights.errors import NoSpaceError, PublishError
from stages.weights.hf_folder import CONFIG_FILE
from stages.weights.layout import INDEX_FILE, Layout, Offer, Slice
from stages.weights.manifest import (
    DTYPE_BYTES,
    FileEntry,
    Manifest,
    Part,
    Probe,
    TensorEntry,
    model_config_digest,
    xxh3_128,
)
from stages.weights.parallel import quick_handover, thread_count
from stages.weights.progress import ProgressWriter
from stages.weights.ranks import agree
from stages.weights.snapshot import Copy, Piece, pieces, woven
from stages.weights.tensors import LocalTensor
from stages.weights.writer import RankWriter, Written, available_bytes, space_checked

if TYPE_CHECKING:
    from stages.weights.publish import Publisher

_SMALL_BYTES_ALLOWANCE = 1 << 20  # manifest and records, beside weights and copied files


@dataclass(frozen=True)
class PublishReport:
    """Of one rank: `snapshot_s`, for how long `begin` kept its caller; `write_s`, from the first write to the last;
    `total_s`, from `begin` to the commit; host memory beyond that of the tensors."""

    snapshot_s: float
    write_s: float
    total_s: float
    peak_extra_host_bytes: int


@dataclass(frozen=True)
class _Opening:
    """First exchange: what a rank owns, and the digest of the version that it has as a base, empty when it wants none; rank 0 adds
    the temporary folder that it made."""

    offer: Offer
    folder: str
    base: str


@dataclass(frozen=True)
class _Done:
    """Last exchange: digests of what a rank wrote, and its payload files; rank 0 adds the small files."""

    parts: Written
    changes: list[tuple[str, DeltaPart]] = field(default_factory=list)
    files: dict[str, FileEntry] = field(default_factory=dict)
    config_digest: str = ""


class Publication:
    """One rank's share of one version on its way; made by `Publisher.begin`. `report` is complete after `finish`."""

    def __init__(
        self, publisher: Publisher, version: int, step: int, probe: Probe | None, *, in_full: bool = False
    ) -> None:
        self.version = version
        self._publisher = publisher
        self._run = publisher.run
        self._step = step
        self._probe = probe
        self._is_first = publisher.ranks.rank == 0
        self._stack = ExitStack()
        self._in_full = in_full
        self._writer = RankWriter()
        self._progress: ProgressWriter | None = None
        self._encoder = RankEncoder()
        self._base: Snapshot | None = None
        self._payloads: Payloads | None = None
        self._copies: list[tuple[Piece, Copy]] = []
        self._small: dict[str, bytes] = {}
        self._folder: FolderPublication | None = None
        self._available_bytes = 0
        self._problem: OSError | RuntimeError | ValueError | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self._manifest: Manifest | None = None
        self._error: OSError | RuntimeError | ValueError | None = None
        self._began_s = time.perf_counter()
        self._snapshot_s = self._total_s = 0.0
        self._extra_bytes = 0

    # ---- beginning ------------------------------------------------------------------------------------------------

    def begin(self, tensors: Iterable[LocalTensor], *, lend: bool) -> None:
        """See `Publisher.begin`."""
        with quick_handover():  # the thread that orders the copies must keep ahead of the GPU
            self._begin(tensors, lend)

    def _begin(self, tensors: Iterable[LocalTensor], lend: bool) -> None:
        try:
            openings = agree(self._publisher.ranks, lambda: self._open(tensors, lend), _Opening)
            self._offers = [opening.offer for opening in openings]
            self._layout = self._publisher.layout(self._offers)
            self._path = next(Path(opening.folder) for opening in openings if opening.folder)
            self._base = self._publisher.base_for(self._offers, {opening.base for opening in openings})
            self._is_kept = self._publisher.keeps_snapshots and not lend
            try:
                self._encode(self._base) if self._base is not None else self._start()
                self._publisher.copier.sum_up()
                if not lend:
                    self._publisher.copier.complete()
                if self._progress is not None:
                    self._progress.tell()
            except (OSError, RuntimeError, ValueError) as problem:
                self._problem = problem  # the other ranks hear of it in `finish`
        except BaseException:
            self._publisher.remember(None)
            self.close()
            raise
        self._snapshot_s = time.perf_counter() - self._began_s

    def _open(self, tensors: Iterable[LocalTensor], lend: bool) -> _Opening:
        """Begin all copies, describe what this rank owns; rank 0 makes the temporary folder."""
        if self._publisher.copies_into_files(lend=lend):
            return self._open_with_copies_in_files(tensors)
        coming = iter(tensors)
        try:
            slices = self._copy(coming, lend)
        except (OSError, RuntimeError, ValueError):
            deque(coming, maxlen=0)  # other ranks may need this one's part to make theirs
            raise
        base = "" if self._in_full or lend else self._publisher.base_digest
        return _Opening(self._offer(slices), self._make_folder() if self._is_first else "", base)

    def _open_with_copies_in_files(self, tensors: Iterable[LocalTensor]) -> _Opening:
        """The only rank: what it owns decides where everything goes."""
        publisher = self._publisher
        with publisher.copier.copying():
            owned = list(tensors)
            publisher.copier.all_made()
            offer = self._offer([local.slice(publisher.dtype) for local in owned])
            layout = publisher.layout([offer])
            folder = self._make_folder()
            with space_checked(self._run.weights, layout.total_bytes):
                spares.fit(Path(folder), layout.sizes)
                files = publisher.map_files(Path(folder), layout.sizes)
            for piece in woven(owned, publisher.dtype):
                self._copies.append((piece, publisher.copier.copy(piece, _place_of(piece, layout, files))))
        return _Opening(offer, folder, "")

    def _offer(self, slices: Sequence[Slice]) -> Offer:
        return Offer(socket.gethostname(), tuple(slices), self._publisher.threads)

    def _copy(self, tensors: Iterator[LocalTensor], lend: bool) -> list[Slice]:
        copier, slices = self._publisher.copier, []
        with copier.copying():
            for local in tensors:
                slices.append(local.slice(self._publisher.dtype))
                for piece in pieces(local, self._publisher.dtype):
                    self._copies.append((piece, copier.lend(piece) if lend else copier.copy(piece)))
        return slices

    def _make_folder(self) -> str:
        run, final = self._run, self._run.weights_version(self.version)
        existing = run.manifest(final, skip_damaged=True)
        if existing is not None and existing["attempt"] == run.attempt:
            raise PublishError(f"version {self.version} was already published by this attempt")
        sweep_leftovers(run, run.weights)
        with space_checked(run.weights, 0):
            self._folder = self._stack.enter_context(run.publishing(final))
        mapped = self._publisher.mapped_files
        mapped.forget_unnamed()
        reused_bytes = 0 if self._publisher.keeps_snapshots else spares.take(run, self._folder.path, mapped)
        self._available_bytes = available_bytes(run.weights) + reused_bytes  # now, before any rank takes of it
        return str(self._folder.path)

    def _start(self) -> None:
        """Let the threads write this rank's pieces, and on rank 0 the headers and the small files."""
        layout, index = self._layout, self._layout.index()
        headers = layout.headers if self._is_first else {}
        self._take_small({INDEX_FILE: index} if index else {}, layout.total_bytes)
        if self._is_first:
            spares.fit(self._path, layout.sizes)
        threads = self._threads()
        converted = max((copy.converted_bytes for _, copy in self._copies), default=0)
        self._extra_bytes = self._publisher.copier.allocated_bytes + threads * converted
        with space_checked(self._path, layout.total_bytes):
            whole = {**headers, **self._small}
            if self._publisher.tells_progress:
                self._progress = ProgressWriter(self._path, self._publisher.ranks.rank)
            self._writer.start(self._path, layout, self._copies, whole, self._publisher.pool, threads, self._progress)

    def _take_small(self, more: dict[str, bytes], weight_bytes: int) -> None:
        """Rank 0: the small files of the version. Raises NoSpaceError when they do not fit beside `weight_bytes`."""
        if not self._is_first:
            return
        self._small = {**self._publisher.small_files, **more}
        wanted = weight_bytes + sum(map(len, self._small.values())) + _SMALL_BYTES_ALLOWANCE
        if self._available_bytes < wanted:
            raise NoSpaceError(str(self._run.weights), wanted, self._available_bytes)

    def _threads(self) -> int:
        """Two fewer than there may be where a GPU copies into the files: they keep up with it, and who orders its copies, and who trains,
        must not wait for a processor."""
        num_bytes = sum(piece.num_bytes for piece, _ in self._copies)
        threads = thread_count(self._publisher.options.io_threads, num_bytes)
        only_hash = self._publisher.copier.is_cuda and all(copy.in_file for _, copy in self._copies)
        return threads - 2 if only_hash and threads > 4 else threads

    # ---- as a delta -----------------------------------------------------------------------------------------------

    def _encode(self, base: Snapshot) -> None:
        """Let the threads compare this rank's pieces with the base's."""
        self._encoder.start(base, self._copies, self._publisher.pool, self._threads())

    def _settle(self, base: Snapshot) -> None:
        """All ranks decide alike, by the bytes of all payloads, and begin to write: those, or the version in full; collective."""
        sizes = agree(self._publisher.ranks, self._payload_bytes, int)
        try:
            if is_worth_it(sum(sizes), base.manifest.weight_bytes, base.links):
                self._start_payloads(sum(sizes))
            else:
                self._start()
        except (OSError, RuntimeError, ValueError) as problem:
            self._problem = problem

    def _payload_bytes(self) -> int:
        if self._problem is not None:
            raise self._problem
        return self._encoder.payload_bytes()

    def _start_payloads(self, total_bytes: int) -> None:
        """Let the threads write this rank's payloads, and on rank 0 the small files."""
        publisher = self._publisher
        payloads = self._encoder.payloads(publisher.ranks.rank, publisher.options.max_file_bytes)
        self._take_small({}, total_bytes)
        self._extra_bytes = publisher.copier.allocated_bytes + 2 * self._encoder.payload_bytes()  # and joined to files
        with space_checked(self._path, total_bytes):
            whole = {**payloads.files, **self._small}
            self._writer.start(self._path, self._layout, [], whole, publisher.pool, self._threads())
        self._payloads = payloads

    # ---- ending ---------------------------------------------------------------------------------------------------

    @property
    def report(self) -> PublishReport:
        write_s = self._writer.ended_s - self._writer.began_s
        return PublishReport(self._snapshot_s, write_s, self._total_s, self._extra_bytes)

    @property
    def is_over(self) -> bool:
        return self._is_over

    def finish(self) -> Manifest:
        """Wait for the writes, commit, and point LATEST.json to the version; collective, in any thread.

        Returns the same manifest on every rank, however often it is called. Raises PublishError on all ranks when any of
        them fails (NoSpaceError when the filesystem is full); then nothing of the version is visible and its temporary
        folder is gone. If LATEST.json alone could not be written, it has its name, and nobody is told of it.
        """
        with self._lock:
            if not self._is_over:
                try:
                    self._manifest = self._finish()
                except (OSError, RuntimeError, ValueError) as problem:
                    self._error = problem
                finally:
                    self._publisher.remember(self._snapshot())
                    self.close()
                    self._is_over = True
        if self._manifest is None:
            raise self._error or PublishError(f"the publication of version {self.version} was broken off")
        return self._manifest

    def _snapshot(self) -> Snapshot | None:
        if self._manifest is None or not self._is_kept:
            return None
        pieces = {(piece.name, piece.box): copy.bytes() for piece, copy in self._copies}
        return Snapshot(self._manifest, self._offers, pieces)

    def _finish(self) -> Manifest:
        ranks = self._publisher.ranks
        if self._base is not None:
            self._settle(self._base)
        written = agree(ranks, self._written, _Done)
        manifest = agree(ranks, lambda: self._commit(written), Manifest | None)[0]
        self._total_s = time.perf_counter() - self._began_s
        assert manifest is not None  # rank 0 commits
        return manifest

    def _written(self) -> _Done:
        if self._problem is not None:
            raise self._problem
        with space_checked(self._run.weights, self._layout.total_bytes):
            # What rank 0 can see, it makes durable when it commits.
            parts = self._writer.finish(flush=self._publisher.flushes and not self._is_first)
        entries = {name: FileEntry(len(data), len(data), xxh3_128(data)) for name, data in self._small.items()}
        config = self._small.get(CONFIG_FILE)
        config_digest = model_config_digest(json.loads(config)) if config else ""
        if self._payloads is None:
            return _Done(parts, [], entries, config_digest)
        return _Done(self._payloads.parts, self._payloads.changes, {**self._payloads.entries, **entries}, config_digest)

    def _commit(self, written: Sequence[_Done]) -> Manifest | None:
        """Rank 0: write the manifest, give the folder its name, advance LATEST.json. None on other ranks."""
        if self._folder is None:
            return None
        manifest = self._make_manifest(written)
        path = self._folder.final.relative_to(self._run.root)
        latest = {"version": self.version, "digest": manifest.digest, "path": str(path)}
        with space_checked(self._run.weights, self._layout.total_bytes):
            self._folder.commit(
                manifest.to_record(), pointer=(self._run.latest_json, latest), flush=self._publisher.flushes
            )
        self._publisher.published(self._folder.final)
        return manifest

    def _make_manifest(self, written: Sequence[_Done]) -> Manifest:
        if self._probe is None:
            raise PublishError("rank 0 gave no probe: an instance could not prove what it loaded")
        parts: dict[str, list[Part]] = {name: [] for name in self._layout.tensors}
        for rank in written:
            for name, part in rank.parts:
                parts[name].append(part)
        delta, headers = self._delta_entry(written), {}
        if delta is None:
            headers = {
                name: FileEntry(self._layout.sizes[name], len(data), xxh3_128(data))
                for name, data in self._layout.headers.items()
            }
        return Manifest.of(
            version=self.version,
            step=self._step,
            model_config_digest=written[0].config_digest,
            files={**headers, **{name: entry for rank in written for name, entry in rank.files.items()}},
            tensors={
                name: TensorEntry.of(place.dtype, place.shape, place.file, place.offset, parts[name])
                for name, place in self._layout.tensors.items()
            },
            probe=self._probe,
            delta=delta,
        )

    def _delta_entry(self, written: Sequence[_Done]) -> DeltaEntry | None:
        if self._base is None or self._payloads is None:
            return None
        changes = [change for rank in written for change in rank.changes]
        return DeltaEntry.of(self._base.manifest.state, self._base.links + 1, changes)

    # ---- whatever happens -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what still copies or writes; without a commit, remove what has been written."""
        self._encoder.close()
        self._writer.close()
        self._publisher.copier.wait()
        self._copies = []
        self._base = self._payloads = None
        self._stack.close()


def _place_of(piece: Piece, layout: Layout, files: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Where the piece lies in its file, uint8[piece.num_bytes]; None when that is not mapped, or it lies there in stretches."""
    place = layout.tensors[piece.name]
    length, offsets = runs(piece.box, piece.full_shape, DTYPE_BYTES[piece.dtype])
    if place.file not in files or length != piece.num_bytes:
        return None
    begin = place.offset + next(offsets, 0)
    return files[place.file][begin : begin + length]
