"""Which checkpoints a run has. Reads commit records and the sizes of files; the bytes are looked at when one is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from stages.checkpoint.errors import DamagedCheckpointError
from stages.checkpoint.manifest import CheckpointManifest, rank_file
from stages.files import DamagedRecordError
from stages.rundir import RunDir
from stages.weights.errors import RecordError

READ_BYTES = 16 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint whose files have the right sizes. `attempt` is the one that saved it."""

    step: int
    path: Path
    manifest: CheckpointManifest
    attempt: int

    def rank_path(self, rank: int) -> Path:
        return self.path / rank_file(rank)


def newest(run: RunDir, tell: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint that is whole by its sizes; None when there is none. `tell` gets a warning for each damaged one."""
    for step in sorted(run.published_checkpoints(), reverse=True):
        try:
            return read(run, step)
        except DamagedCheckpointError as damage:
            tell(f"warning: {damage}; looking for an older one")
    return None


def available(run: RunDir) -> list[Checkpoint | DamagedCheckpointError]:
    """Every checkpoint, newest first; in the place of a damaged one stands what is wrong with it."""
    return [_read_or_damage(run, step) for step in sorted(run.published_checkpoints(), reverse=True)]


def read(run: RunDir, step: int) -> Checkpoint:
    """The checkpoint of `step`. Raises DamagedCheckpointError for a manifest or a size that is wrong."""
    path = run.checkpoint(step)
    what = str(path.relative_to(run.root))
    try:
        record = run.manifest(path)
        if record is None:
            raise DamagedCheckpointError(what, "it has no manifest.json of this run")
        manifest = CheckpointManifest.from_record(record, f"manifest of {what}")
    except (RecordError, DamagedRecordError) as problem:
        raise DamagedCheckpointError(what, str(problem)) from problem
    if manifest.step != step or manifest.version != step:
        raise DamagedCheckpointError(what, f"its manifest is of step {manifest.step} and version {manifest.version}")
    for name, entry in manifest.files.items():
        found = _size(path / name)
        if found != entry.bytes:
            size = "missing" if found is None else f"{found:,} bytes"
            raise DamagedCheckpointError(what, f"{name} is {size}, its manifest says {entry.bytes:,} bytes")
    return Checkpoint(step, path, manifest, int(record["attempt"]))


def verify(checkpoint: Checkpoint) -> None:
    """Read every byte. Raises DamagedCheckpointError naming the first file that is not what was saved."""
    for name, entry in checkpoint.manifest.files.items():
        digest = xxhash.xxh3_128()
        try:
            with open(checkpoint.path / name, "rb") as file:
                while data := file.read(READ_BYTES):
                    digest.update(data)
        except OSError as problem:
            raise DamagedCheckpointError(str(checkpoint.path), f"{name} cannot be read: {problem}") from problem
        if digest.hexdigest() != entry.xxh3_128:
            problem_text = f"xxh3-128 of {name} is {digest.hexdigest()}, its manifest says {entry.xxh3_128}"
            raise DamagedCheckpointError(str(checkpoint.path), problem_text)


def _read_or_damage(run: RunDir, step: int) -> Checkpoint | DamagedCheckpointError:
    try:
        return read(run, step)
    except DamagedCheckpointError as damage:
        return damage


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None
