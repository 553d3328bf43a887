"""Publish a version of the weights: every trainer rank writes what it owns, rank 0 commits."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from conf.sections import WeightsConfig
from stages.publication import Publication
from stages.rundir import RunDir
from stages.weights.boxes import runs
from stages.weights.collect import sweep_leftovers
from stages.weights.errors import NoSpaceError, PublishError
from stages.weights.hf_folder import CONFIG_FILE, small_files
from stages.weights.layout import INDEX_FILE, Layout, Offer, plan_layout
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
from stages.weights.parallel import map_threads, thread_count
from stages.weights.ranks import RankGroup, SingleRank, agree
from stages.weights.tensors import SAFETENSORS_NAMES, TORCH_DTYPES, LocalTensor, bytes_of

_WRITE_BYTES = 64 << 20  # one pwrite; Linux cuts longer ones at 2 GiB anyway
_SMALL_BYTES_ALLOWANCE = 1 << 20  # manifest and records, beside weights and copied files


def publish(
    run: RunDir,
    *,
    version: int,
    step: int,
    tensors: Iterable[LocalTensor],
    probe: Probe | None,
    source_folder: Path,
    options: WeightsConfig,
    ranks: RankGroup | None = None,
) -> Manifest:
    """Write weights/v<version>/, a complete HF folder, and point LATEST.json to it; collective over `ranks`.

    `tensors` are the slices that this rank owns: over all ranks every element exactly once. Tensors are converted to
    `options.dtype` where they lie, copied to the host, hashed and written one by one by a few threads, so that the
    extra memory is one tensor per thread. `probe` and `source_folder` (a HF folder: config, tokenizer) count on rank 0.

    Returns the same manifest on every rank. Raises PublishError on all ranks when any of them fails (NoSpaceError
    when the filesystem is full); then nothing of the version is visible and its temporary folder is gone.
    """
    with ExitStack() as stack:
        job = _Publishing(
            run, version, step, list(tensors), probe, source_folder, options, ranks or SingleRank(), stack
        )
        openings = agree(job.ranks, job.open, _Opening)
        folder = next(Path(opening.folder) for opening in openings if opening.folder)
        layout = plan_layout([opening.offer for opening in openings], options.max_file_bytes)
        written = agree(job.ranks, lambda: job.write(folder, layout), _Written)
        manifest = agree(job.ranks, lambda: job.commit(layout, written), Manifest | None)[0]
        assert manifest is not None  # rank 0 commits
        return manifest


@dataclass(frozen=True)
class _Opening:
    """First exchange: what a rank owns; rank 0 adds the temporary folder that it made."""

    offer: Offer
    folder: str


@dataclass(frozen=True)
class _Written:
    """Second exchange: digests of what a rank wrote; rank 0 adds the small files."""

    parts: list[tuple[str, Part]]
    files: dict[str, FileEntry] = field(default_factory=dict)
    config_digest: str = ""


@dataclass
class _Publishing:
    """One rank's share of one publication."""

    run: RunDir
    version: int
    step: int
    tensors: list[LocalTensor]
    probe: Probe | None
    source: Path
    options: WeightsConfig
    ranks: RankGroup
    stack: ExitStack
    publication: Publication | None = None
    available_bytes: int = 0

    @property
    def dtype(self) -> str:
        return SAFETENSORS_NAMES[self.options.dtype]

    def open(self) -> _Opening:
        """Describe what this rank owns; rank 0 makes the temporary folder."""
        offer = Offer(socket.gethostname(), tuple(tensor.slice(self.dtype) for tensor in self.tensors))
        if self.ranks.rank != 0:
            return _Opening(offer, "")
        final = self.run.weights_version(self.version)
        existing = self.run.manifest(final)
        if existing is not None and existing["attempt"] == self.run.attempt:
            raise PublishError(f"version {self.version} was already published by this attempt")
        sweep_leftovers(self.run, self.run.weights)
        self.available_bytes = _available_bytes(self.run.weights)  # now, before any rank takes of it
        with _space_checked(self.run.weights, 0):
            self.publication = self.stack.enter_context(self.run.publishing(final))
        return _Opening(offer, str(self.publication.path))

    def write(self, folder: Path, layout: Layout) -> _Written:
        """Write this rank's bytes of the weight files, and on rank 0 the headers and the small files."""
        with _space_checked(folder, layout.total_bytes), ExitStack() as files:
            small = self._small_files(layout) if self.ranks.rank == 0 else {}
            if self.ranks.rank == 0:
                self._require_space(layout.total_bytes + sum(map(len, small.values())) + _SMALL_BYTES_ALLOWANCE)
            needed = {layout.tensors[tensor.name].file for tensor in self.tensors}
            names = sorted(needed | (layout.headers.keys() | small.keys() if self.ranks.rank == 0 else set()))
            fds = {name: _open_for_writing(folder / name, files) for name in names}
            if self.ranks.rank == 0:
                for name, data in {**layout.headers, **small}.items():
                    _pwrite(fds[name], memoryview(data), 0)
            parts = self._write_tensors(layout, fds)
            if self.ranks.rank != 0:  # what rank 0 can see, it makes durable when it commits
                map_threads(os.fsync, list(fds.values()), len(fds))
        entries = {name: FileEntry(len(data), len(data), xxh3_128(data)) for name, data in small.items()}
        return _Written(parts, entries, model_config_digest(json.loads(small[CONFIG_FILE])) if small else "")

    def commit(self, layout: Layout, written: list[_Written]) -> Manifest | None:
        """Rank 0: write the manifest, give the folder its name, advance LATEST.json. None on other ranks."""
        if self.publication is None:
            return None
        manifest = self._manifest(layout, written)
        path = self.publication.final.relative_to(self.run.root)
        latest = {"version": self.version, "digest": manifest.digest, "path": str(path)}
        with _space_checked(self.run.weights, layout.total_bytes):
            self.publication.commit(manifest.to_record(), pointer=(self.run.latest_json, latest))
        return manifest

    def _require_space(self, wanted_bytes: int) -> None:
        if self.available_bytes < wanted_bytes:
            raise NoSpaceError(str(self.run.weights), wanted_bytes, self.available_bytes)

    def _small_files(self, layout: Layout) -> dict[str, bytes]:
        index = layout.index()
        return {**small_files(self.source, self.options.dtype), **({INDEX_FILE: index} if index else {})}

    def _write_tensors(self, layout: Layout, fds: Mapping[str, int]) -> list[tuple[str, Part]]:
        def write(tensor: LocalTensor) -> tuple[str, Part]:
            place = layout.tensors[tensor.name]
            return tensor.name, _write_slice(tensor, place.dtype, fds[place.file], place.offset)

        if any(tensor.tensor.is_cuda for tensor in self.tensors):
            torch.cuda.synchronize()  # the copying threads run on streams that do not wait for the optimizer's
        num_bytes = sum(tensor.tensor.numel() for tensor in self.tensors) * DTYPE_BYTES[self.dtype]
        return map_threads(write, self.tensors, thread_count(self.options.io_threads, num_bytes))

    def _manifest(self, layout: Layout, written: list[_Written]) -> Manifest:
        if self.probe is None:
            raise PublishError("rank 0 gave no probe: an instance could not prove what it loaded")
        parts: dict[str, list[Part]] = {name: [] for name in layout.tensors}
        for rank in written:
            for name, part in rank.parts:
                parts[name].append(part)
        headers = {
            name: FileEntry(layout.sizes[name], len(data), xxh3_128(data)) for name, data in layout.headers.items()
        }
        return Manifest.of(
            version=self.version,
            step=self.step,
            model_config_digest=written[0].config_digest,
            files={**headers, **written[0].files},
            tensors={
                name: TensorEntry.of(place.dtype, place.shape, place.file, place.offset, parts[name])
                for name, place in layout.tensors.items()
            },
            probe=self.probe,
        )


def _write_slice(local: LocalTensor, dtype: str, fd: int, offset: int) -> Part:
    """Convert, copy to the host, hash and write one slice of the tensor that starts at `offset` of the file."""
    data = bytes_of(local.tensor.detach().to(TORCH_DTYPES[dtype]).cpu().contiguous())
    piece = local.slice(dtype)
    first, length, stride, count = runs(piece.box, piece.full_shape, DTYPE_BYTES[dtype])
    view = data.data
    for row in range(count):
        _pwrite(fd, view[row * length : (row + 1) * length], offset + first + row * stride)
    return Part(piece.box.start, piece.box.shape, xxh3_128(data))


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + _WRITE_BYTES], offset + done)


def _open_for_writing(path: Path, files: ExitStack) -> int:
    # Write-only and never truncated: several ranks have the file open, and an NFS client that may also read a page
    # may write all of it back, over its neighbour's bytes (Linux nfs_can_extend_write).
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    files.callback(os.close, fd)  # close reports write errors too (NFS), so it may raise
    return fd


def _available_bytes(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


@contextmanager
def _space_checked(folder: Path, wanted_bytes: int) -> Iterator[None]:
    """Give a full filesystem or quota its own error."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(str(folder), wanted_bytes, _available_bytes(folder)) from problem
        raise
