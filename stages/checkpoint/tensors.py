"""Files of named tensors, written and read in one pass: each byte is copied, hashed and handed to the filesystem once.

The format is safetensors, so that any other tool reads them. The library's own functions want all of a file's tensors in
host memory at once, and would read the file a second time for its digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from stages.checkpoint.errors import DamagedCheckpointError, LayoutMismatchError
from stages.checkpoint.manifest import FileEntry

CHUNK_BYTES = 32 << 20
NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}
"""safetensors names, widest first: the order of the tensors in a file, so that each is aligned."""
_ORDER = {dtype: place for place, dtype in enumerate(NAMES)}
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Span:
    """`tensor` has the bytes start .. start + length of a file."""

    name: str
    tensor: torch.Tensor
    start: int
    length: int


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[Span]]:
    """The head of the file that holds `tensors` (8 bytes of length, little endian, then JSON), and where each one lies.

    Raises ValueError for a number format that is not in NAMES.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}; a checkpoint holds {', '.join(NAMES.values())}")
    ordered = sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0]))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    spans = []
    for name, tensor in ordered:
        start, end = (len(head) + offset for offset in entries[name]["data_offsets"])
        spans.append(Span(name, tensor, start, end - start))
    return head, spans


def file_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Length of the file that holds `tensors`."""
    head, spans = layout(tensors)
    return len(head) + sum(span.length for span in spans)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write a new file, durable when this returns. Hashing and copies from the device go on while the chunk before is written.

    Raises OSError, FileExistsError when `path` exists.
    """
    head, spans = layout(tensors)
    digest = xxhash.xxh3_128(head)
    written = len(head)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, memoryview(head))
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as writer:
            pending: Future[None] | None = None
            for data in _host_chunks(spans):
                digest.update(data)
                if pending is not None:
                    pending.result()
                pending = writer.submit(_write_all, fd, data)
                written += len(data)
            if pending is not None:
                pending.result()
        os.fsync(fd)
    finally:
        os.close(fd)
    return FileEntry(written, digest.hexdigest())


def read_tensors(path: Path, entry: FileEntry, into: Mapping[str, torch.Tensor]) -> None:
    """Fill `into` from a file; its digest is known, and compared, when all was read: after an error `into` may hold anything.

    Raises DamagedCheckpointError, and LayoutMismatchError when the file holds other tensors than `into`.
    """
    wanted_head, spans = layout(into)
    checkpoint = path.parent.name
    try:
        with open(path, "rb", buffering=0) as file:
            head = _read_head(file.fileno(), entry.bytes)
            digest = xxhash.xxh3_128(head)
            is_same = head == wanted_head
            targets = [_Target(span.length, span.tensor) for span in spans]
            for data in _filled(file.fileno(), targets if is_same else [_Target(entry.bytes - len(head), None)]):
                digest.update(data)
    except (OSError, EOFError) as problem:
        raise DamagedCheckpointError(checkpoint, f"{path.name} cannot be read: {problem}") from problem
    if digest.hexdigest() != entry.xxh3_128:
        what = f"xxh3-128 of {path.name} is {digest.hexdigest()}, its manifest says {entry.xxh3_128}"
        raise DamagedCheckpointError(checkpoint, what)
    if not is_same:
        raise _mismatch(checkpoint, path.name, wanted_head, head)


@dataclass(frozen=True)
class _Target:
    """The next `length` bytes of a file belong into `tensor`; None: nowhere, they are only hashed."""

    length: int
    tensor: torch.Tensor | None


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8[n], sharing the memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _chunks(length: int) -> Iterator[slice]:
    yield from (slice(start, min(start + CHUNK_BYTES, length)) for start in range(0, length, CHUNK_BYTES))


class _Staging:
    """Two pinned host buffers in turn, made at the first use: pageable memory is copied to a GPU thirty times slower."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._turn = 0

    def next(self, length: int, *, pinned: bool) -> torch.Tensor:
        """uint8[length]; what was handed out the time before last is overwritten."""
        if not self._buffers:
            self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._turn ^= 1
        return self._buffers[self._turn][:length]


def _host_chunks(spans: list[Span]) -> Iterator[memoryview]:
    """The bytes of all spans in order. A chunk stays valid until the next but one is asked for."""
    staging = _Staging()
    for span in spans:
        flat = _flat_bytes(span.tensor.contiguous())
        for part in _chunks(span.length):
            data = flat[part]
            if data.is_cuda:
                data = staging.next(len(data), pinned=True).copy_(data)
            yield data.numpy().data


def _filled(fd: int, targets: list[_Target]) -> Iterator[memoryview]:
    """Read on from where `fd` stands into `targets`, chunk by chunk; the next chunk is read while the caller has one."""
    staging = _Staging()
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as reader:
        waiting: tuple[Future[None], torch.Tensor, torch.Tensor | None] | None = None
        for target in targets:
            flat = None if target.tensor is None else _flat_bytes(target.tensor)
            for part in _chunks(target.length):
                place = None if flat is None else flat[part]
                in_place = place is not None and not place.is_cuda
                length = part.stop - part.start
                host = place if in_place and place is not None else staging.next(length, pinned=place is not None)
                following = (reader.submit(_read_all, fd, host.numpy().data), host, None if in_place else place)
                if waiting is not None:
                    yield _arrived(*waiting)
                waiting = following
        if waiting is not None:
            yield _arrived(*waiting)


def _arrived(reading: Future[None], host: torch.Tensor, place: torch.Tensor | None) -> memoryview:
    reading.result()
    if place is not None:
        place.copy_(host)
    return host.numpy().data


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


def _read_all(fd: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = os.readv(fd, [into[done:]])
        if count == 0:
            raise EOFError("it ends too early")
        done += count


def _read_head(fd: int, total_bytes: int) -> bytes:
    """The first bytes of a safetensors file, up to the data. Raises EOFError."""
    length = bytearray(_LENGTH_BYTES)
    _read_all(fd, memoryview(length))
    text_bytes = int.from_bytes(length, "little")
    if text_bytes > total_bytes - _LENGTH_BYTES:
        raise EOFError(f"its head claims {text_bytes:,} bytes")
    text = bytearray(text_bytes)
    _read_all(fd, memoryview(text))
    return bytes(length + text)


def _mismatch(checkpoint: str, file: str, wanted: bytes, found: bytes) -> LayoutMismatchError:
    """Names the first tensor that differs."""
    try:
        both = [json.loads(head[_LENGTH_BYTES:]) for head in (wanted, found)]
    except ValueError:
        return LayoutMismatchError(
            checkpoint, f"head of {file}", "JSON", "something else", "use the version that saved it"
        )
    name = min(name for name in both[0].keys() | both[1].keys() if both[0].get(name) != both[1].get(name))
    texts = [_described(tensors.get(name)) for tensors in both]
    change = "use the options of model, parallel sizes and optimizer that it was saved with"
    return LayoutMismatchError(checkpoint, f"tensor {name} in {file}", texts[0], texts[1], change)


def _described(entry: Mapping[str, Any] | None) -> str:
    return "none" if entry is None else f"{entry['dtype']} {entry['shape']} at {entry['data_offsets']}"
