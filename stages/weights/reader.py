"""Read a version that is published in full, each byte once, and believe nothing that its manifest does not confirm.

`stages.weights.versions` reads any version, deltas too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash

from stages.files import list_names, wait_for
from stages.rundir import RunDir
from stages.weights.boxes import runs
from stages.weights.errors import (
    DigestMismatchError,
    ManifestMismatchError,
    NotInFullError,
    SizeMismatchError,
    VersionNotPublishedError,
    WeightsError,
)
from stages.weights.manifest import DTYPE_BYTES, FileEntry, Manifest, Part, TensorEntry, xxh3_128
from stages.weights.parallel import map_threads, thread_count
from stages.weights.tensors import bytes_of, empty_tensor

_READ_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20
"""Read, hashed and handed on, or only hashed: small enough for a processor's cache."""
_HASHED_BYTES = 64 << 20
"""Read and hashed where nobody is handed anything: two calls for a part, as a trainer publishes it. Calls for 1 MB, which stays in a core's
cache, take 0.52 s instead of 0.60 for 16 GB when nothing else happens on an H200 host with 16 cores, and 0.78 to 0.86 instead of 0.57 to
0.60 for 15 GB beside an engine that generates: each is a handover of the interpreter's lock between 16 threads.
"""


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
    run: RunDir,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    *,
    threads: int = 0,
    into: Mapping[str, torch.Tensor] | None = None,
    arrived: Callable[[str, int, int], None] | None = None,
    check: Callable[[], None] | None = None,
    have: Mapping[tuple[str, int, int], str] | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors of a full version on the CPU, in the published number format, each byte read once and verified.

    `names` restricts the tensors (and the files that are looked at); `threads` 0 takes this process's processors.
    `into` holds contiguous CPU tensors to read into, of the published format and shape; others are allocated.
    `arrived` is called with (tensor, first byte, length) for bytes that were just read and hashed, by the thread that read
    them, while they are in its processor's cache; together the calls name every byte once, but for `have`. Only when this function
    returns are they known to be those of the manifest. `check` runs before each piece, and raises to give up.
    `have` gives digests of what is in `into` already, by tensor, first byte and length: what is a part with that digest is not read.
    File lengths are compared first, then the digests of small files, headers and tensors.
    Raises SizeMismatchError, DigestMismatchError, KeyError for an unknown name; `into` may then hold anything. NotInFullError.
    """
    wanted = manifest.tensors if names is None else {name: manifest.tensors[name] for name in names}
    given = into or {}
    tensors = {
        name: given[name] if name in given else empty_tensor(entry.dtype, entry.shape) for name, entry in wanted.items()
    }

    def read(piece: _Piece, fds: Mapping[str, int]) -> None:
        if check is not None:
            check()
        is_one_part = len(piece.parts) == 1
        if have and is_one_part and have.get((piece.name, piece.first, piece.length)) == piece.parts[0].xxh3_128:
            return
        _read_piece(fds[piece.entry.file], piece, tensors[piece.name], arrived)

    only = None if names is None else {entry.file for entry in wanted.values()}
    _for_pieces(run, manifest, wanted, only, threads, read)
    return tensors


def verify(run: RunDir, manifest: Manifest, *, threads: int = 0) -> None:
    """The checks of `read_verified` on all files, keeping nothing in memory; raises for the first fault found."""
    _for_pieces(run, manifest, manifest.tensors, None, threads, lambda piece, fds: _verify_piece(fds, piece))


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
    """Of a version in full."""
    try:
        _check_prefix(fd, file, manifest.files[file])
    except WeightsError as problem:
        yield problem
    for name, entry in manifest.tensors.items():
        if entry.file == file:
            try:
                for piece in _pieces(name, entry):
                    _verify_piece({file: fd}, piece)
            except WeightsError as problem:
                yield problem


@dataclass(frozen=True)
class _Piece:
    """Parts of one tensor that are read by one thread: bytes [first, first + length) of the tensor."""

    name: str
    entry: TensorEntry
    parts: tuple[Part, ...]
    first: int
    length: int


def _pieces(name: str, entry: TensorEntry) -> list[_Piece]:
    """One for each part when each lies in a row, so that a large tensor has several readers; else one."""
    width = DTYPE_BYTES[entry.dtype]
    stretches = [(part, *runs(part.box, entry.shape, width)) for part in entry.parts]
    if all(length == part.box.elements * width for part, length, _ in stretches):
        return [_Piece(name, entry, (part,), next(offsets, 0), length) for part, length, offsets in stretches]
    return [_Piece(name, entry, entry.parts, 0, entry.bytes)]


def _for_pieces(
    run: RunDir,
    manifest: Manifest,
    tensors: Mapping[str, TensorEntry],
    only_files: set[str] | None,
    threads: int,
    read: Callable[[_Piece, Mapping[str, int]], None],
) -> None:
    """Open the files, then check their beginnings and `read` every piece, the largest first: none is left to one thread at the
    end while the others have nothing to do. Of equal ones in the order of the bytes on disk."""
    if manifest.delta is not None:
        raise NotInFullError(manifest.version, manifest.delta.base.version)
    files = {name: entry for name, entry in manifest.files.items() if only_files is None or name in only_files}
    items = sorted(tensors.items(), key=lambda item: (item[1].file, item[1].offset))
    pieces = [piece for name, entry in items for piece in _pieces(name, entry)]
    num_threads = thread_count(threads, sum(entry.bytes for entry in tensors.values()))
    with _opened(run, run.weights_version(manifest.version), files) as fds:
        jobs = [
            *((entry.digest_bytes, partial(_check_prefix, fds[name], name, entry)) for name, entry in files.items()),
            *((piece.length, partial(read, piece, fds)) for piece in pieces),
        ]
        jobs.sort(key=lambda job: -job[0])
        map_threads(lambda job: job[1](), jobs, num_threads)


@contextmanager
def checked_files(run: RunDir, manifest: Manifest, files: Mapping[str, FileEntry]) -> Iterator[dict[str, int]]:
    """Descriptors of some files of a version, after comparing their lengths, and of each its beginning with its digest."""
    with _opened(run, run.weights_version(manifest.version), files) as fds:
        for name, entry in files.items():
            _check_prefix(fds[name], name, entry)
        yield fds


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
    read_into(fd, memoryview(buffer), 0, name, entry.bytes)
    found = xxh3_128(buffer)
    if found != entry.xxh3_128:
        raise DigestMismatchError("", name, entry.xxh3_128, found)


def _read_piece(
    fd: int, piece: _Piece, tensor: torch.Tensor, arrived: Callable[[str, int, int], None] | None = None
) -> None:
    """Read the piece to its place in `tensor`, which is the whole one."""
    entry, (part, *others) = piece.entry, piece.parts
    memory = bytes_of(tensor).data
    if others:
        read_into(fd, memory, entry.offset, entry.file, entry.offset + entry.bytes)
        for each in piece.parts:
            _compare(piece, each, digest_of_slice(tensor[each.box.slices()]))
        if arrived is not None:
            arrived(piece.name, 0, entry.bytes)
        return
    hasher = xxhash.xxh3_128()
    view = memory[piece.first : piece.first + piece.length]
    chunk_bytes = _HASHED_BYTES if arrived is None else _whole_rows(entry)
    for begin in range(0, piece.length, chunk_bytes):
        chunk = view[begin : begin + chunk_bytes]
        offset = entry.offset + piece.first + begin
        read_into(fd, chunk, offset, entry.file, entry.offset + entry.bytes)
        hasher.update(chunk)
        if arrived is not None:
            arrived(piece.name, piece.first + begin, len(chunk))
    _compare(piece, part, hasher.hexdigest())


def _whole_rows(entry: TensorEntry) -> int:
    """About _CHUNK_BYTES, in whole rows where a row is not longer: who adds up columns has less to do."""
    row_bytes = (entry.shape[-1] if entry.shape else 1) * DTYPE_BYTES[entry.dtype]
    return _CHUNK_BYTES // row_bytes * row_bytes if 0 < row_bytes <= _CHUNK_BYTES else _CHUNK_BYTES


def _verify_piece(fds: Mapping[str, int], piece: _Piece) -> None:
    """`_read_piece` into one chunk of memory where the bytes follow each other, else into a tensor of its own."""
    entry, (part, *others) = piece.entry, piece.parts
    fd = fds[entry.file]
    if others:
        _read_piece(fd, piece, empty_tensor(entry.dtype, entry.shape))
        return
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(piece.length, _CHUNK_BYTES)))
    for begin in range(0, piece.length, _CHUNK_BYTES):
        chunk = buffer[: min(_CHUNK_BYTES, piece.length - begin)]
        offset = entry.offset + piece.first + begin
        read_into(fd, chunk, offset, entry.file, entry.offset + entry.bytes)
        hasher.update(chunk)
    _compare(piece, part, hasher.hexdigest())


def digest_of_slice(tensor: torch.Tensor) -> str:
    """Of the elements in row-major order; a few rows are made contiguous at a time, not a copy of all of it."""
    hasher = xxhash.xxh3_128()
    tensor = torch.atleast_1d(tensor)
    rows = max(1, _CHUNK_BYTES * len(tensor) // max(1, tensor.numel() * tensor.element_size()))
    for block in tensor.split(rows) if tensor.numel() else ():
        hasher.update(bytes_of(block.contiguous()).data)
    return hasher.hexdigest()


def _compare(piece: _Piece, part: Part, found: str) -> None:
    if found != part.xxh3_128:
        raise DigestMismatchError(piece.name, piece.entry.file, part.xxh3_128, found)


def read_into(fd: int, view: memoryview, offset: int, file: str, wanted_bytes: int) -> None:
    """Fill `view` from `offset` on; a file that ends early was cut after its length was compared."""
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done : done + _READ_BYTES]], offset + done)
        if got == 0:
            raise SizeMismatchError(file, wanted_bytes, offset + done)
        done += got
