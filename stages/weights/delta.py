"""What changed between two versions of a tensor: positions and new values, compressed.

A step of reinforcement learning moves few 16-bit weights: the step is far smaller than the distance between two neighbours of
that format. A delta holds the elements that did move, as their new bits. Overwriting is idempotent, which an exclusive or or a
difference is not: applied twice, or once more after an application that was cut off half way, it gives the same result.

    delta, payload = encode(base, new, width=2)     bytes of two versions of one contiguous tensor or slice
    new = apply(delta, payload, base)               a new array
    overwrite(delta, payload, target)               in place

Every delta names the digests of its base and of its result. `apply` and `overwrite` refuse any other base (WrongBaseError) and
check what came out (WrongResultError). The digests are those that manifests hold for parts (`stages.weights.manifest.Part`).

Format of a payload, little endian. The tensor is cut into blocks of `BLOCK_ELEMENTS`, which are encoded by themselves, so that
threads can share a tensor. First one u32 for each block: its length in bytes. A block of length 0 is unchanged. Else its first byte
tells its kind, then a u32 the number of changes. Kind 2: the new bytes follow as they are (so many changed that this is shorter).
Kind 1: for each stream one byte (1: zlib, 0: as it is) and a u32 length, then the streams:

    short gaps   u8 for each change: elements that are skipped since the change before; 255 means "see the long gaps"
    long gaps    u32 for each 255
    values       one stream for each byte of an element, lowest byte first: the highest (sign, exponent) compresses well

zlib is in Python itself, and at level 1 it stays within about a bit a change of the entropy of these streams (docs/benchmarks.md); a
stream of random mantissas is recognised by its beginning and left as it is.

Who makes them: `stages.weights.encoder`, beside `stages.weights.publication`. Who reads them: `stages.weights.versions`, and in place
`stages.rollout.staged_delta`. Rules: `stages.weights.delta_chain`. Record: `stages.weights.delta_entry`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stages.weights.errors import WeightsError
from stages.weights.fields import Fields

xxh3_128: Callable[[Any], str] = xxhash.xxh3_128_hexdigest

BLOCK_ELEMENTS = 1 << 20
_SPARSE, _FULL = 1, 2
_STORED, _ZLIB = 0, 1
_HEAD = struct.Struct("<BI")
"""Kind and number of changes of a block; method and length of a stream."""
_LONG = 255
_LEVEL = 1
_SAMPLE_BYTES = 1 << 14
_GAIN = 0.95
"""A stream is compressed when its beginning shrinks at least to this share."""
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]
"""uint16 or uint32: elements as bit patterns. NaNs and negative zeros are patterns like all others."""


class DeltaError(WeightsError):
    """A delta is damaged, or not of the size that it says."""


class WrongBaseError(DeltaError):
    """The bytes at hand are not those that the delta was made against."""

    def __init__(self, wanted: str, found: str) -> None:
        super().__init__(wanted, found)

    def __str__(self) -> str:
        return f"the delta changes bytes with digest {self.args[0]}, these have {self.args[1]}"


class WrongResultError(DeltaError):
    """What came out is not what the delta was made from."""

    def __init__(self, wanted: str, found: str) -> None:
        super().__init__(wanted, found)

    def __str__(self) -> str:
        return f"the delta gave bytes with digest {self.args[1]}, wanted {self.args[0]}"


@dataclass(frozen=True)
class Delta:
    """`base`, `result` and `payload` are xxh3-128 digests; `width` in bytes; `bytes` is the payload's length."""

    base: str
    result: str
    payload: str
    width: int
    elements: int
    changed: int
    bytes: int

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> Delta:
        fields = Fields(record, what)
        delta = cls(
            base=fields.text("base"),
            result=fields.text("result"),
            payload=fields.text("payload"),
            width=fields.integer("width", min(_DTYPES)),
            elements=fields.integer("elements"),
            changed=fields.integer("changed"),
            bytes=fields.integer("bytes"),
        )
        fields.finish()
        if delta.width not in _DTYPES:
            raise fields.error("width", f"wanted one of {sorted(_DTYPES)}, got {delta.width}")
        if delta.changed > delta.elements:
            raise fields.error("changed", f"{delta.changed} of {delta.elements} elements")
        return delta


def encode(
    base: Bytes, new: Bytes, width: int, *, digests: tuple[str, str] | None = None, pool: Executor | None = None
) -> tuple[Delta, bytes]:
    """The delta and its payload. Both are uint8[elements * width], contiguous; `pool` shares the blocks among threads.

    `digests` of base and new version, by who has them already.
    """
    before, after = _words(base, width), _words(new, width)
    if before.shape != after.shape:
        raise ValueError(f"base has {len(before)} elements, the new version {len(after)}")
    encoded = list(_each(pool, _encode_block, zip(_blocks(before), _blocks(after), strict=True)))
    table = np.array([len(block) for _, block in encoded], np.dtype("<u4")).tobytes()
    payload = table + b"".join(block for _, block in encoded)
    changed = sum(count for count, _ in encoded)
    of_base, of_new = digests or (xxh3_128(base), xxh3_128(new))
    return Delta(of_base, of_new, xxh3_128(payload), width, len(after), changed, len(payload)), payload


def apply(delta: Delta, payload: bytes, base: Bytes, *, pool: Executor | None = None) -> Bytes:
    """The new version as an array of its own. Raises WrongBaseError, DeltaError, WrongResultError."""
    target = base.copy()
    overwrite(delta, payload, target, pool=pool)
    return target


def overwrite(
    delta: Delta,
    payload: bytes,
    target: Bytes,
    *,
    held: str = "",
    torn: bool = False,
    pool: Executor | None = None,
) -> None:
    """Turn the base in `target` into the new version; what is the new version already stays as it is.

    `held` is the digest of what is in `target`, by who has verified it before; else it is made. `torn` says that an
    application of this very delta to its base was cut off: then only the result is checked.

    Raises WrongBaseError, and DeltaError for a damaged payload, before anything is written; after another DeltaError,
    such as WrongResultError, `target` is worth nothing.
    """
    words = _words(target, delta.width)
    if (len(words), len(payload)) != (delta.elements, delta.bytes):
        raise DeltaError(
            f"{len(words)} elements and a payload of {len(payload)} bytes, wanted {delta.elements} and {delta.bytes}"
        )
    found = xxh3_128(payload)
    if found != delta.payload:
        raise DeltaError(f"the payload's digest is {found}, wanted {delta.payload}")
    if not torn:
        held = held or xxh3_128(target)
        if held == delta.result:
            return
        if held != delta.base:
            raise WrongBaseError(delta.base, held)
    changed = sum(_each(pool, _decode_block, zip(_blocks(words), _cut(payload, len(words)), strict=True)))
    if changed != delta.changed:
        raise DeltaError(f"{changed} elements were changed, wanted {delta.changed}")
    result = xxh3_128(target)
    if result != delta.result:
        raise WrongResultError(delta.result, result)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _words(data: Bytes, width: int) -> Words:
    if width not in _DTYPES:
        raise ValueError(f"elements of {width} bytes, wanted one of {sorted(_DTYPES)}")
    words: Words = data.reshape(-1).view(_DTYPES[width])
    return words


def _blocks(words: Words) -> Iterator[Words]:
    return (words[start : start + BLOCK_ELEMENTS] for start in range(0, len(words), BLOCK_ELEMENTS))


def _each(pool: Executor | None, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> Iterable[Any]:
    call = partial(_spread, function)
    return map(call, arguments) if pool is None else pool.map(call, arguments)


def _spread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def _encode_block(before: Words, after: Words) -> tuple[int, bytes]:
    """(changed elements, bytes)."""
    positions = np.flatnonzero(before != after)
    if not len(positions):
        return 0, b""
    width = after.dtype.itemsize
    if len(positions) * (1 + width) >= len(after) * width:  # as many bytes as the block, if nothing can be compressed
        return len(positions), _HEAD.pack(_FULL, len(positions)) + after.tobytes()
    gaps = np.diff(positions, prepend=-1) - 1
    planes = after[positions].view(np.uint8).reshape(-1, width)
    streams = [
        np.minimum(gaps, _LONG).astype(np.uint8).tobytes(),
        gaps[gaps >= _LONG].astype("<u4").tobytes(),
        *(planes[:, place].tobytes() for place in range(width)),
    ]
    packed = [_pack(stream) for stream in streams]
    heads = b"".join(_HEAD.pack(method, len(data)) for method, data in packed)
    block = _HEAD.pack(_SPARSE, len(positions)) + heads + b"".join(data for _, data in packed)
    return len(positions), block


def _pack(stream: bytes) -> tuple[int, bytes]:
    sample = stream[:_SAMPLE_BYTES]
    if len(zlib.compress(sample, _LEVEL)) > _GAIN * len(sample):
        return _STORED, stream
    return _ZLIB, zlib.compress(stream, _LEVEL)


def _cut(payload: bytes, elements: int) -> Iterator[memoryview]:
    """The payload of each block."""
    num_blocks = -(-elements // BLOCK_ELEMENTS)
    if len(payload) < 4 * num_blocks:
        raise DeltaError(f"the payload has {len(payload)} bytes, its table alone {4 * num_blocks}")
    ends = 4 * num_blocks + np.cumsum(np.frombuffer(payload, "<u4", num_blocks), dtype=np.int64)
    if (int(ends[-1]) if num_blocks else 0) != len(payload):
        raise DeltaError(f"the blocks of the payload do not end with its {len(payload)} bytes")
    view = memoryview(payload)
    return (view[start:end] for start, end in pairwise([4 * num_blocks, *ends]))


def _decode_block(target: Words, block: memoryview) -> int:
    """Overwrite what changed; returns how many elements the block names."""
    if not len(block):
        return 0
    if len(block) < _HEAD.size:
        raise DeltaError(f"a block of {len(block)} bytes")
    kind, count = _HEAD.unpack_from(block)
    if kind == _FULL:
        if len(block) != _HEAD.size + target.nbytes:
            raise DeltaError(f"a full block has {len(block) - _HEAD.size} bytes, wanted {target.nbytes}")
        target[:] = np.frombuffer(block[_HEAD.size :], target.dtype)
        return int(count)
    if kind != _SPARSE or count == 0:
        raise DeltaError(f"a block of kind {kind} with {count} changes")
    streams = _streams(block, target.dtype.itemsize, count)
    gaps = streams[0].astype(np.int64)
    is_long = gaps == _LONG
    gaps[is_long] = streams[1].view("<u4")
    positions = np.cumsum(gaps + 1) - 1
    if positions[-1] >= len(target):
        raise DeltaError(f"{count} changes reach beyond a block of {len(target)} elements")
    target[positions] = np.stack(streams[2:], axis=1).reshape(-1).view(target.dtype)
    return int(count)


def _streams(block: memoryview, width: int, count: int) -> list[Bytes]:
    """Each of the length that follows from the number of changes."""
    num_streams = 2 + width
    start = _HEAD.size * (1 + num_streams)
    if len(block) < start:
        raise DeltaError(f"a sparse block of {len(block)} bytes")
    streams: list[Bytes] = []
    for number in range(num_streams):
        method, length = _HEAD.unpack_from(block, _HEAD.size * (1 + number))
        wanted = 4 * int(np.count_nonzero(streams[0] == _LONG)) if number == 1 else count
        streams.append(_unpack(method, block[start : start + length], wanted))
        start += length
    if start != len(block):
        raise DeltaError(f"the streams of a block end at {start}, the block at {len(block)}")
    return streams


def _unpack(method: int, data: memoryview, wanted: int) -> Bytes:
    """Exactly `wanted` bytes; a stream that would give more is not unpacked further."""
    if method == _ZLIB:
        unpacker = zlib.decompressobj()
        try:
            found = unpacker.decompress(data, wanted + 1)
        except zlib.error as problem:
            raise DeltaError(f"a stream cannot be unpacked: {problem}") from problem
    elif method == _STORED:
        found = bytes(data)
    else:
        raise DeltaError(f"a stream is packed by method {method}")
    if len(found) != wanted:
        raise DeltaError(f"a stream has {len(found)} bytes or more, wanted {wanted}")
    return np.frombuffer(found, np.uint8)
