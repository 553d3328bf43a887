"""Read a published version, each byte once, and believe nothing that its manifest does not confirm."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from stages.files import list_names, wait_for
from stages.rundir import RunDir
from stages.weights.errors import (
    DigestMismatchError,
    ManifestMismatchError,
    SizeMismatchError,
    VersionNotPublishedError,
    WeightsError,
)
from stages.weights.manifest import FileEntry, Manifest, TensorEntry, xxh3_128
from stages.weights.parallel import map_threads, thread_count
from stages.weights.tensors import bytes_of, empty_tensor

_READ_BYTES = 64 << 20

Result = TypeVar("Result")


def load_manifest(run: RunDir, version: int, expected_digest: str | None = None) -> Manifest:
    """The manifest of a version of this run, from any attempt.

    Raises VersionNotPublishedError, RecordError (damaged), ManifestMismatchError (of another version or digest).
    """
    folder = run.weights_version(version)
    try:
        record = run.manifest(folder)
    except ValueError as problem:
        raise WeightsError(f"{folder / 'manifest.json'} is damaged: {problem}") from problem
    if record is None:
        raise VersionNotPublishedError(version, str(folder))
    manifest = Manifest.from_record(record, f"manifest of version {version}")
    if manifest.version != version:
        raise ManifestMismatchError(version, "version", str(version), str(manifest.version))
    if expected_digest is not None and manifest.digest != expected_digest:
        raise ManifestMismatchError(version, "digest", expected_digest, manifest.digest)
    return manifest


def wait_for_manifest(
    run: RunDir,
    version: int,
    expected_digest: str | None,
    *,
    deadline_s: float,
    check: Callable[[], None] | None = None,
) -> Manifest:
    """As `load_manifest`, for a folder that another host may see later than the request for it (NFS: up to 60 s)."""
    folder = run.weights_version(version)

    def look() -> Manifest | None:
        if folder.name not in list_names(run.weights):
            return None
        try:
            return load_manifest(run, version, expected_digest)
        except VersionNotPublishedError:
            return None

    return wait_for(look, deadline_s=deadline_s, awaited=f"{folder}", from_whom="the trainer", check=check)


def read_verified(
    run: RunDir, manifest: Manifest, names: Iterable[str] | None = None, *, threads: int = 0
) -> dict[str, torch.Tensor]:
    """Tensors of a version on the CPU, in the published number format, each byte read once and verified.

    `names` restricts the tensors (and the files that are looked at); `threads` 0 takes this process's processors.
    File lengths are compared first, then the digests of small files and headers, then tensors.
    Raises SizeMismatchError, DigestMismatchError, KeyError for an unknown name.
    """
    wanted = manifest.tensors if names is None else {name: manifest.tensors[name] for name in names}

    def read(item: tuple[str, TensorEntry], fds: Mapping[str, int]) -> tuple[str, torch.Tensor]:
        return item[0], _read_tensor(fds[item[1].file], *item)

    only = None if names is None else {entry.file for entry in wanted.values()}
    return dict(_for_tensors(run, manifest, wanted, only, threads, read))


def verify(run: RunDir, manifest: Manifest, *, threads: int = 0) -> None:
    """The checks of `read_verified` on all files, keeping nothing in memory; raises for the first fault found."""

    def read(item: tuple[str, TensorEntry], fds: Mapping[str, int]) -> None:
        _read_tensor(fds[item[1].file], *item)

    _for_tensors(run, manifest, manifest.tensors, None, threads, read)


def faults(run: RunDir, manifest: Manifest) -> list[WeightsError]:
    """Every fault of a version, for people: does not stop at the first."""
    found: list[WeightsError] = []
    folder = run.weights_version(manifest.version)
    for file, entry in manifest.files.items():
        try:
            with _opened(run, folder, {file: entry}) as fds:
                found += _file_faults(fds[file], file, manifest)
        except SizeMismatchError as problem:
            found.append(problem)
    return found


def _file_faults(fd: int, file: str, manifest: Manifest) -> Iterator[WeightsError]:
    try:
        _check_prefix(fd, file, manifest.files[file])
    except WeightsError as problem:
        yield problem
    for name, entry in manifest.tensors.items():
        if entry.file == file:
            try:
                _read_tensor(fd, name, entry)
            except WeightsError as problem:
                yield problem


def _for_tensors(
    run: RunDir,
    manifest: Manifest,
    tensors: Mapping[str, TensorEntry],
    only_files: set[str] | None,
    threads: int,
    read: Callable[[tuple[str, TensorEntry], Mapping[str, int]], Result],
) -> list[Result]:
    """Open and check the files, then `read` every tensor in the order of the bytes on disk."""
    files = {name: entry for name, entry in manifest.files.items() if only_files is None or name in only_files}
    items = sorted(tensors.items(), key=lambda item: (item[1].file, item[1].offset))
    num_threads = thread_count(threads, sum(entry.bytes for entry in tensors.values()))
    with _opened(run, run.weights_version(manifest.version), files) as fds:
        for name, entry in files.items():
            _check_prefix(fds[name], name, entry)
        return map_threads(lambda item: read(item, fds), items, num_threads)


@contextmanager
def _opened(run: RunDir, folder: Path, files: Mapping[str, FileEntry]) -> Iterator[dict[str, int]]:
    """Descriptors of all `files`, after comparing all their lengths."""
    with ExitStack() as stack:
        fds = {}
        for name, entry in files.items():
            fds[name] = _open(run.inside(folder / name), name, entry)
            stack.callback(os.close, fds[name])
        yield fds


def _open(path: Path, name: str, entry: FileEntry) -> int:
    try:
        # Not blocking: a fifo in place of the file must not hang us.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SizeMismatchError(name, entry.bytes, None) from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != entry.bytes:
        os.close(fd)
        raise SizeMismatchError(name, entry.bytes, status.st_size)
    return fd


def _check_prefix(fd: int, name: str, entry: FileEntry) -> None:
    buffer = bytearray(entry.digest_bytes)
    _read_into(fd, memoryview(buffer), 0, name, entry.bytes)
    found = xxh3_128(buffer)
    if found != entry.xxh3_128:
        raise DigestMismatchError("", name, entry.xxh3_128, found)


def _read_tensor(fd: int, name: str, entry: TensorEntry) -> torch.Tensor:
    tensor = empty_tensor(entry.dtype, entry.shape)
    _read_into(fd, bytes_of(tensor).data, entry.offset, entry.file, entry.offset + entry.bytes)
    for part in entry.parts:
        # A slice along a later dimension is not contiguous; hashing it costs a copy of that slice.
        found = xxh3_128(bytes_of(tensor[part.box.slices()].contiguous()))
        if found != part.xxh3_128:
            raise DigestMismatchError(name, entry.file, part.xxh3_128, found)
    return tensor


def _read_into(fd: int, view: memoryview, offset: int, file: str, wanted_bytes: int) -> None:
    """Fill `view` from `offset` on; a file that ends early was cut after its length was compared."""
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done : done + _READ_BYTES]], offset + done)
        if got == 0:
            raise SizeMismatchError(file, wanted_bytes, offset + done)
        done += got
