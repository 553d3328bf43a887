"""Copies of a rank's tensors in host memory, made so that training can change the parameters while the copies are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from stages.weights.boxes import Box, split
from stages.weights.manifest import DTYPE_BYTES
from stages.weights.sums import VersionSums
from stages.weights.tensors import TORCH_DTYPES, Bytes, LocalTensor, bytes_of

PIECE_BYTES = 64 << 20
"""What is copied, hashed and written in one go, and has a digest of its own in the manifest."""
_SMALL_ELEMENTS = 1 << 19
_FIRST_SEGMENT_BYTES = 64 << 20
_LAST_SEGMENT_BYTES = 512 << 20
_ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class Piece:
    """A box of a tensor to be published as `dtype` (safetensors name), and the view of the live tensor that holds it."""

    name: str
    full_shape: tuple[int, ...]
    dtype: str
    box: Box
    tensor: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.box.elements * DTYPE_BYTES[self.dtype]

    def shaped(self, memory: torch.Tensor) -> torch.Tensor:
        """`memory` (uint8[num_bytes]) in the published format and shape."""
        return memory.view(TORCH_DTYPES[self.dtype]).view(self.box.shape)

    @property
    def is_ready(self) -> bool:
        """Is the live memory what is published?"""
        return self.tensor.dtype == TORCH_DTYPES[self.dtype] and self.tensor.is_contiguous()

    def converted(self) -> torch.Tensor:
        """Contiguous and in the published format, on the tensor's device; the live memory itself where it is that already."""
        return self.tensor.to(TORCH_DTYPES[self.dtype]).contiguous()


def pieces(local: LocalTensor, dtype: str) -> Iterator[Piece]:
    """The tensor in pieces of about PIECE_BYTES."""
    box = local.slice(dtype).box
    for part in split(box, PIECE_BYTES // DTYPE_BYTES[dtype]):
        inner = Box(tuple(a - b for a, b in zip(part.start, box.start, strict=True)), part.shape)
        yield Piece(local.name, tuple(local.full_shape), dtype, part, local.tensor.detach()[inner.slices()])


def woven(owned: Sequence[LocalTensor], dtype: str) -> Iterator[Piece]:
    """The pieces of large tensors in their order, between them those of small ones.

    Small ones take a GPU no time to copy, but the interpreter as much as large ones: at the end they would be waited for alone.
    """
    small = deque(local for local in owned if local.tensor.numel() < _SMALL_ELEMENTS)
    large = [local for local in owned if local.tensor.numel() >= _SMALL_ELEMENTS]
    share = -(-len(small) // max(1, len(large) // 2))
    for local in large:
        yield from pieces(local, dtype)
        for _ in range(min(share, len(small))):
            yield from pieces(small.popleft(), dtype)
    for local in small:
        yield from pieces(local, dtype)


class Copy(Protocol):
    """A piece on its way into host memory. `converted_bytes` is what `bytes` allocates.

    `in_file`: that memory is its place in the version's file.
    """

    @property
    def converted_bytes(self) -> int: ...

    @property
    def in_file(self) -> bool: ...

    def bytes(self) -> Bytes:
        """Waits until it is there, uint8[n]."""
        ...

    def sum64(self) -> int | None:
        """That of the part, made where the tensor lies; None where that would cost a pass over host memory.

        Waits until all copies of the version are there.
        """
        ...


class HostBuffers:
    """Host memory for the copies of one version, kept for the next: allocating pinned memory takes half a second per GB."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._segments: list[torch.Tensor] = []
        self._used_bytes: list[int] = []
        self._used_before = 0

    @property
    def allocated_bytes(self) -> int:
        return sum(segment.numel() for segment in self._segments)

    def clear(self) -> None:
        """Everything taken since the last time may be taken again; what was needed neither then nor before is given back."""
        used = max((number for number, used_bytes in enumerate(self._used_bytes, 1) if used_bytes), default=0)
        del self._segments[max(used, self._used_before) :]
        self._used_before = used
        self._used_bytes = [0] * len(self._segments)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Memory that nobody else has until `clear`, uint8[num_bytes]: where it first fits."""
        for number, segment in enumerate(self._segments):
            begin = self._used_bytes[number]
            if begin + num_bytes <= segment.numel():
                self._used_bytes[number] += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                return segment[begin : begin + num_bytes]
        # Powers of two, because torch rounds pinned memory up to one.
        grown = min(_FIRST_SEGMENT_BYTES << len(self._segments), _LAST_SEGMENT_BYTES)
        self._segments.append(torch.empty(max(grown, num_bytes), dtype=torch.uint8, pin_memory=self._pinned))
        self._used_bytes.append(0)
        return self.take(num_bytes)


@dataclass(frozen=True)
class _Lent:
    """No copy at all: the tensor stays as it is until it is written."""

    piece: Piece
    in_file: bool = False

    @property
    def converted_bytes(self) -> int:
        return 0 if self.piece.is_ready else self.piece.num_bytes

    def bytes(self) -> Bytes:
        return bytes_of(self.piece.converted())

    def sum64(self) -> None:
        return None


@dataclass(frozen=True)
class _Filling:
    """A thread copies it."""

    target: torch.Tensor
    done: Future[object]
    in_file: bool
    converted_bytes: int = 0

    def bytes(self) -> Bytes:
        self.done.result()
        return bytes_of(self.target)

    def sum64(self) -> None:
        return None


@dataclass
class _Arriving:
    """A CUDA stream copies it. `ordered` gives the event behind the copy; `number` is that of its sum in `sums`, set once it is begun."""

    target: torch.Tensor
    in_file: bool
    sums: VersionSums
    ordered: Future[torch.cuda.Event] = field(default_factory=Future)
    number: int | None = None
    converted_bytes: int = 0

    def bytes(self) -> Bytes:
        self.ordered.result().synchronize()
        return bytes_of(self.target)

    def sum64(self) -> int | None:
        return None if self.number is None else self.sums.value(self.number)


class _Events:
    """Events that a thread can wait for asleep, instead of keeping a processor from the writers. Made once: each takes half a
    millisecond (measured in a virtual machine, by what asks for an interrupt)."""

    def __init__(self) -> None:
        self._made: list[torch.cuda.Event] = []
        self._taken = 0

    def clear(self) -> None:
        """Nobody waits for any."""
        self._taken = 0

    def recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        if self._taken == len(self._made):
            self._made.append(torch.cuda.Event(blocking=True))
        event = self._made[self._taken]
        self._taken += 1
        event.record(stream)
        return event


class Copier:
    """Begins copies of pieces, on whatever device they lie; one version at a time.

    Copies from a GPU run on a stream of their own that begins behind what the current stream has to do, into pinned memory.
    Temporary device memory is one piece: it belongs to that stream, which uses it again in its own order. The sums of their words
    are made there too; those of what needs no conversion on a second stream: where another process computes on the GPU each sum
    has to wait for its turn, and copies must not wait for sums.

    A thread of its own gives that stream its orders: whoever gives more than some hundred waits until the first are done, and
    what has arrived is to be written meanwhile (measured on an H200 host: 540 copies of 15 GB took as long to order as to do).
    """

    def __init__(self, device: torch.device, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sum_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fillings: list[Future[object]] = []
        self.buffers = HostBuffers(pinned=self._stream is not None)
        self._kept: HostBuffers | None = None
        self._sums = VersionSums(device)
        self._events = _Events()
        self._not_summed: list[tuple[Piece, _Arriving]] = []
        self._made: torch.cuda.Event | None = None
        self._orders: list[Future[torch.cuda.Event]] = []
        self._orderer: ThreadPoolExecutor | None = None
        if self._stream is not None:
            orders_to = partial(torch.cuda.set_stream, self._stream)  # the current stream is the thread's
            self._orderer = ThreadPoolExecutor(1, thread_name_prefix="copies", initializer=orders_to)

    @property
    def is_cuda(self) -> bool:
        return self._stream is not None

    @property
    def allocated_bytes(self) -> int:
        return self.buffers.allocated_bytes + (0 if self._kept is None else self._kept.allocated_bytes)

    def keep(self) -> None:
        """What was copied last stays as it is while the next version is copied, to other memory."""
        kept = self._kept or HostBuffers(pinned=self._stream is not None)
        self.buffers, self._kept = kept, self.buffers

    @contextmanager
    def copying(self) -> Iterator[None]:
        """What makes tensors (views, gathers) inside does it on the stream that copies them."""
        self.wait()
        self.buffers.clear()
        self._sums.clear()
        self._events.clear()
        self._not_summed = []
        self._made = None
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def all_made(self) -> None:
        """Inside `copying`, before the first copy: no further tensor will be made there, so sums need not wait for copies."""
        if self._stream is not None:
            self._made = self._events.recorded(self._stream)

    def sum_up(self) -> None:
        """Make the sums of what was copied. Tensors on a GPU may change only after `wait`."""
        if self._stream is None or self._sum_stream is None:
            return
        with torch.cuda.stream(self._sum_stream):
            if self._made is not None:
                self._sum_stream.wait_event(self._made)
            for piece, copy in self._not_summed:
                if self._made is None:
                    # What was made beside the copies is there by then.
                    self._sum_stream.wait_event(copy.ordered.result())
                copy.number = self._sums.begin(piece.tensor, piece.box, piece.full_shape)
        for order in self._orders:
            order.result()
        self._stream.wait_stream(self._sum_stream)
        with torch.cuda.stream(self._stream):
            self._sums.bring()

    def copy(self, piece: Piece, place: torch.Tensor | None = None) -> Copy:
        """Inside `copying`. The copy is complete when its `bytes` returns.

        `place` is its memory in the version's file, uint8[piece.num_bytes], pinned for a GPU.
        """
        target = piece.shaped(self.buffers.take(piece.num_bytes) if place is None else place)
        if not piece.tensor.is_cuda:
            self._fillings.append(self._pool.submit(target.copy_, piece.tensor))
            return _Filling(target, self._fillings[-1], place is not None)
        assert self._orderer is not None, "the publisher of a CUDA tensor needs its device"
        copy = _Arriving(target, place is not None, self._sums)
        if piece.is_ready:
            self._not_summed.append((piece, copy))
        copy.ordered = self._orderer.submit(self._order, piece, copy)
        self._orders.append(copy.ordered)
        return copy

    def _order(self, piece: Piece, copy: _Arriving) -> torch.cuda.Event:
        assert self._stream is not None
        converted = piece.converted()
        copy.target.copy_(converted, non_blocking=True)
        arrived = self._events.recorded(self._stream)
        if not piece.is_ready:
            copy.number = self._sums.begin(converted, piece.box, piece.full_shape)
        return arrived

    def lend(self, piece: Piece) -> Copy:
        """As `copy`, for a caller who leaves the tensor alone until it is written: host memory is not copied."""
        return self.copy(piece) if piece.tensor.is_cuda else _Lent(piece)

    def complete(self) -> None:
        """Until all copies and sums of the version are there; raises what one of them failed with.

        Not by the events of all: some hundred waits, each of which gives up the interpreter's lock, took 40 ms beside 16 writers.
        """
        for filling in self._fillings:
            filling.result()
        for order in self._orders:
            order.result()
        if self._stream is not None:
            self._events.recorded(self._stream).synchronize()  # asleep: writers have the processors

    def wait(self) -> None:
        """Until no copy is under way, whether it succeeded or not."""
        wait(self._fillings)
        wait(self._orders)
        self._fillings, self._orders = [], []
        if self._stream is not None:
            self._stream.synchronize()  # which waits for the other one

    def close(self) -> None:
        if self._orderer is not None:
            self._orderer.shutdown()
