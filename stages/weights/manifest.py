"""The commit record of a published version: what every byte of its folder must be.

A file's own digest covers its first `digest_bytes` bytes: all of a small file, the header of a weight file. The rest of
a weight file is covered by the digests of its tensors. So the bytes of a version are hashed exactly once, also when
several ranks write slices of one tensor: each slice is a part with a digest of its own. xxh3-128 finds damage and
mix-ups; it is no protection against malice.

A part may also have a sum of its words (`stages.weights.sums`), made where the trainer has the tensor. An engine compares it with what
arrived in its own memory: one check of the whole way from the one to the other. A manifest without sums is as good; who reads it
then makes them of the bytes that digests have verified.

A version may be published as a delta of another one (`stages.weights.delta_entry`). Its tensors have the digests that they have in
full, and the places that they would have; its files hold payloads in their stead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from stages.weights.boxes import Box, tiling_problem, word_columns
from stages.weights.delta_chain import State
from stages.weights.delta_entry import DeltaEntry, DeltaPart
from stages.weights.errors import RecordError, SignatureMismatchError
from stages.weights.fields import Fields

DTYPE_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
"""Width of the number formats that can be published, by their safetensors names."""
_INT64 = (-(1 << 63), (1 << 63) - 1)
_CONFIG_KEYS_OF_NO_SHAPE = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path"})


def xxh3_128(data: Any) -> str:
    """Digest of any C-contiguous buffer, as 32 hexadecimal digits. Releases the GIL for large buffers."""
    return xxhash.xxh3_128_hexdigest(data)


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def model_config_digest(config: Mapping[str, Any]) -> str:
    """Names the architecture in a HF config.json, whatever its number format and the library that wrote it."""
    return xxh3_128(canonical({key: value for key, value in config.items() if key not in _CONFIG_KEYS_OF_NO_SHAPE}))


@dataclass(frozen=True)
class Probe:
    """A fixed sequence and what the trainer's weights say about it, for the engine's proof of load.

    `logprobs[i]` = log p(token_ids[i + 1] | token_ids[: i + 1]) at temperature 1, in nats.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or len(self.logprobs) != len(self.token_ids) - 1:
            problem = f"{len(self.token_ids)} token ids and {len(self.logprobs)} log-probs, wanted n and n - 1, n >= 2"
            raise RecordError("probe", "logprobs", problem)
        if not all(map(math.isfinite, self.logprobs)):
            raise RecordError("probe", "logprobs", "not finite: the weights are broken")

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Probe:
        fields = Fields(record, "probe")
        probe = cls(fields.integers("token_ids"), fields.numbers("logprobs"))
        fields.finish()
        return probe


@dataclass(frozen=True)
class Part:
    """A box of a tensor, the digest of its elements in row-major order, and, where somebody made it, their sum (int64)."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    xxh3_128: str
    sum64: int | None = None

    @property
    def box(self) -> Box:
        return Box(self.start, self.shape)

    @property
    def content(self) -> dict[str, Any]:
        """The record without the sum."""
        return {"start": self.start, "shape": self.shape, "xxh3_128": self.xxh3_128}

    def to_record(self) -> dict[str, Any]:
        return self.content if self.sum64 is None else {**self.content, "sum64": self.sum64}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> Part:
        fields = Fields(record, what)
        start, shape, digest = fields.integers("start"), fields.integers("shape"), fields.text("xxh3_128")
        sum64 = fields.integer("sum64", *_INT64) if "sum64" in record else None
        fields.finish()
        return cls(start, shape, digest, sum64)


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies (`offset` from the start of `file`, in bytes) and what it must be."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    bytes: int
    xxh3_128: str
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], file: str, offset: int, parts: Iterable[Part]) -> TensorEntry:
        ordered = tuple(sorted(parts, key=lambda part: part.start))
        return cls(dtype, shape, file, offset, math.prod(shape) * DTYPE_BYTES[dtype], combined(ordered), ordered)

    def to_record(self) -> dict[str, Any]:
        return {**vars(self), "parts": [part.to_record() for part in self.parts]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> TensorEntry:
        fields = Fields(record, what)
        dtype = fields.text("dtype", tuple(DTYPE_BYTES))
        shape, file, offset = fields.integers("shape"), fields.text("file"), fields.integer("offset", 8)
        size, digest, raw = fields.integer("bytes"), fields.text("xxh3_128"), fields.take("parts")
        if not isinstance(raw, list) or not all(isinstance(part, dict) for part in raw):
            raise fields.error("parts", "wanted a list of objects")
        entry = cls.of(dtype, shape, file, offset, (Part.from_record(part, what) for part in raw))
        fields.finish()
        if (entry.bytes, entry.xxh3_128) != (size, digest):
            raise fields.error("bytes", f"{size} bytes with digest {digest} do not follow from shape, dtype and parts")
        if problem := tiling_problem(shape, [part.box for part in entry.parts]):
            raise fields.error("parts", problem)
        if impossible := [part for part in entry.parts if part.sum64 is not None and entry.words_of(part) is None]:
            raise fields.error("sum64", f"slice {impossible[0].box} of {list(shape)} is not made of whole 64-bit words")
        return entry

    def words_of(self, part: Part) -> range | None:
        """The columns that it covers, in 64-bit words; see `stages.weights.boxes.word_columns`."""
        return word_columns(part.box, self.shape, DTYPE_BYTES[self.dtype])


def combined(parts: tuple[Part, ...]) -> str:
    """The digest of a tensor: that of its bytes when one part is all of it, else one of the parts' boxes and digests.

    It names the content, so it does not depend on whether somebody made sums.
    """
    if len(parts) == 1:
        return parts[0].xxh3_128
    return xxh3_128(canonical([part.content for part in parts]))


@dataclass(frozen=True)
class FileEntry:
    """`xxh3_128` covers the first `digest_bytes` of the `bytes` of the file; see the module's docstring."""

    bytes: int
    digest_bytes: int
    xxh3_128: str

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> FileEntry:
        fields = Fields(record, what)
        entry = cls(fields.integer("bytes"), fields.integer("digest_bytes"), fields.text("xxh3_128"))
        fields.finish()
        return entry


@dataclass(frozen=True)
class Manifest:
    """`digest` names the whole version: number, step, every file and tensor, the probe. `delta` is None for one that is complete."""

    version: int
    step: int
    model_config_digest: str
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    probe: Probe
    digest: str
    delta: DeltaEntry | None = None

    @classmethod
    def of(
        cls,
        *,
        version: int,
        step: int,
        model_config_digest: str,
        files: Mapping[str, FileEntry],
        tensors: Mapping[str, TensorEntry],
        probe: Probe,
        delta: DeltaEntry | None = None,
    ) -> Manifest:
        """Complete a manifest with its digest. Raises RecordError when files and tensors do not fit together."""
        unnamed = cls(version, step, model_config_digest, dict(files), dict(tensors), probe, "", delta)
        _check_cover(unnamed)
        record = unnamed.to_record()
        del record["digest"]
        return replace(unnamed, digest=xxh3_128(canonical(record)))

    @property
    def state(self) -> State:
        return State(self.version, self.digest)

    @property
    def total_bytes(self) -> int:
        """Of the files."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def weight_bytes(self) -> int:
        """Of the tensors in full."""
        return sum(entry.bytes for entry in self.tensors.values())

    def to_record(self) -> dict[str, Any]:
        # dataclasses.asdict copies deeply: milliseconds for a small model, seconds for one of many experts.
        record = {
            **vars(self),
            "files": {name: dict(vars(entry)) for name, entry in self.files.items()},
            "tensors": {name: entry.to_record() for name, entry in self.tensors.items()},
            "probe": dict(vars(self.probe)),
        }
        del record["delta"]
        return record if self.delta is None else {**record, "delta": self.delta.to_record()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str = "manifest") -> Manifest:
        """Raises RecordError for anything that a published manifest cannot be, a wrong digest of itself included."""
        fields = Fields(record, what)
        delta = DeltaEntry.from_record(fields.mapping("delta"), f"{what}, delta") if "delta" in record else None
        version, step = fields.integer("version"), fields.integer("step")
        config_digest, digest = fields.text("model_config_digest"), fields.text("digest")
        files = {
            name: FileEntry.from_record(_object(fields, "files", entry), f"{what}, file {name}")
            for name, entry in fields.mapping("files").items()
        }
        tensors = {
            name: TensorEntry.from_record(_object(fields, "tensors", entry), f"{what}, tensor {name}")
            for name, entry in fields.mapping("tensors").items()
        }
        probe = Probe.from_record(fields.mapping("probe"))
        fields.finish()
        manifest = cls.of(
            version=version,
            step=step,
            model_config_digest=config_digest,
            files=files,
            tensors=tensors,
            probe=probe,
            delta=delta,
        )
        if manifest.digest != digest:
            raise fields.error("digest", f"the record says {digest}, its content gives {manifest.digest}")
        return manifest


def check_signature(manifest: Manifest, reference: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Compare names, number formats and shapes with `reference`; raises SignatureMismatchError for the first difference."""
    for name in sorted(reference.keys() | manifest.tensors.keys()):
        if name not in manifest.tensors:
            raise SignatureMismatchError(name, "not in the published version")
        if name not in reference:
            raise SignatureMismatchError(name, "published, but the model has no such tensor")
        found = manifest.tensors[name].dtype, tuple(manifest.tensors[name].shape)
        wanted = reference[name][0], tuple(reference[name][1])
        if found != wanted:
            raise SignatureMismatchError(name, f"published as {found}, the model has {wanted}")


def _object(fields: Fields, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fields.error(name, f"wanted objects, got {value!r}")
    return value


def _check_cover(manifest: Manifest) -> None:
    """Every file has a plain name, and header and contents of a file follow each other without gap or overlap."""
    for name in manifest.files:
        if "/" in name or name.startswith(".") or name in ("", "manifest.json"):
            raise RecordError("manifest", "files", f"{name!r} is not a plain file name")
    end = {name: entry.digest_bytes for name, entry in manifest.files.items()}
    for file, offset, size, name in sorted(_contents(manifest)):
        if file not in end:
            raise RecordError("manifest", "tensors", f"{name} lies in {file!r}, which is not among the files")
        if offset != end[file]:
            raise RecordError("manifest", "tensors", f"{name} starts at {offset}, wanted {end[file]}")
        end[file] += size
    for name, entry in manifest.files.items():
        if end[name] != entry.bytes:
            raise RecordError("manifest", "files", f"{name} has {entry.bytes} bytes, {end[name]} of them have a digest")


def _contents(manifest: Manifest) -> Iterator[tuple[str, int, int, str]]:
    """(file, offset, bytes, tensor) of what lies behind the headers: tensors, or payloads that change them."""
    if manifest.delta is None:
        yield from ((tensor.file, tensor.offset, tensor.bytes, name) for name, tensor in manifest.tensors.items())
        return
    if manifest.delta.base.version >= manifest.version:
        raise RecordError("manifest", "delta", f"its base, version {manifest.delta.base.version}, is not older")
    for name, parts in manifest.delta.parts.items():
        _check_changes(name, parts, manifest.tensors.get(name))
        yield from ((part.file, part.offset, part.delta.bytes, name) for part in parts)


def _check_changes(name: str, parts: tuple[DeltaPart, ...], entry: TensorEntry | None) -> None:
    """What payloads give are parts that the tensor has, each once."""
    of_tensor = {} if entry is None else {part.start: part for part in entry.parts if part.box.elements}
    for change in parts:
        part, delta = of_tensor.pop(change.start, None), change.delta
        if part is None or entry is None:
            raise RecordError(
                "manifest", "delta", f"tensor {name} has no part at {list(change.start)}, or it has two payloads"
            )
        wanted = (part.xxh3_128, part.box.elements, DTYPE_BYTES[entry.dtype])
        if (delta.result, delta.elements, delta.width) != wanted:
            problem = (
                f"a payload of {name} gives {delta.elements} elements of {delta.width} bytes with digest {delta.result}"
            )
            raise RecordError("manifest", "delta", f"{problem}; the part has {wanted[1]}, {wanted[2]}, {wanted[0]}")
