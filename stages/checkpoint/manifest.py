"""The commit record of a checkpoint: what its files must be, and what it can be resumed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stages.weights.fields import Fields

FORMAT = 1
DTYPES = ("float32", "bfloat16")


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class FileEntry:
    """Length of a whole file, and the xxh3-128 of all its bytes, as `xxhsum -H2` prints it."""

    bytes: int
    xxh3_128: str

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> FileEntry:
        fields = Fields(record, what)
        entry = cls(fields.integer("bytes", 8), fields.text("xxh3_128"))
        fields.finish()
        return entry


@dataclass(frozen=True)
class Layout:
    """How the state is divided over the trainer's ranks; `dtype` is that of the model's parameters."""

    tp: int
    dp: int
    world_size: int
    dtype: str

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> Layout:
        fields = Fields(record, what)
        layout = cls(
            fields.integer("tp", 1),
            fields.integer("dp", 1),
            fields.integer("world_size", 1),
            fields.text("dtype", DTYPES),
        )
        fields.finish()
        return layout


@dataclass(frozen=True)
class Fingerprint:
    """What the state belongs to: digests of config.json, of tokenizer.json ("" without one), of the task and its seed."""

    architecture: str
    config: str
    tokenizer: str
    task: str

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> Fingerprint:
        fields = Fields(record, what)
        found = cls(
            fields.text("architecture"),
            fields.text("config"),
            fields.text("tokenizer", empty=True),
            fields.text("task"),
        )
        fields.finish()
        return found


@dataclass(frozen=True)
class CheckpointManifest:
    """`version` of the weights equals `step`. Measured: `save_s` of this checkpoint, `step_s` the median of recent steps.

    `step_s` is 0.0 when no step was measured.
    """

    step: int
    version: int
    layout: Layout
    model: Fingerprint
    files: dict[str, FileEntry]
    save_s: float
    step_s: float

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def to_record(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> CheckpointManifest:
        """Raises RecordError naming the field that is missing, wrong or unknown."""
        fields = Fields(record, what)
        if (found := fields.integer("format")) != FORMAT:
            raise fields.error("format", f"{found}; this version of Libra reads format {FORMAT}")
        manifest = cls(
            step=fields.integer("step", 1),
            version=fields.integer("version", 1),
            layout=Layout.from_record(fields.mapping("layout"), f"{what}, layout"),
            model=Fingerprint.from_record(fields.mapping("model"), f"{what}, model"),
            files={
                name: FileEntry.from_record(entry, f"{what}, file {name}")
                for name, entry in fields.mapping("files").items()
            },
            save_s=fields.number("save_s"),
            step_s=fields.number("step_s"),
        )
        fields.finish()
        wanted = [rank_file(rank) for rank in range(manifest.layout.world_size)]
        if sorted(manifest.files) != wanted:
            raise fields.error(
                "files", f"wanted one for each rank, {wanted[0]} to {wanted[-1]}, got {sorted(manifest.files)}"
            )
        return manifest
