"""Save a checkpoint: every trainer rank writes its own file, rank 0 commits."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from stages.checkpoint.errors import TRAVELS, NoCheckpointSpaceError, SaveError
from stages.checkpoint.find import Checkpoint
from stages.checkpoint.manifest import CheckpointManifest, FileEntry, Fingerprint, Layout, rank_file
from stages.checkpoint.tensors import file_bytes, write_tensors
from stages.publication import Publication
from stages.rundir import RunDir
from stages.weights.collect import sweep_leftovers
from stages.weights.ranks import RankGroup, agree

_MANIFEST_BYTES_ALLOWANCE = 1 << 20


def save(
    run: RunDir,
    *,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    layout: Layout,
    model: Fingerprint,
    step_s: float,
    ranks: RankGroup,
) -> Checkpoint:
    """Write checkpoints/step_<step>/; collective over `ranks`, each with its own `tensors` (device or host).

    Returns the same checkpoint on every rank; it and its files are durable then. Raises SaveError on all ranks when any of
    them fails (NoCheckpointSpaceError where the filesystem is too full) and FencedError when a newer attempt exists: then
    nothing of it is visible, its temporary folder is gone, and older checkpoints are untouched.
    """
    started_s = time.monotonic()
    with ExitStack() as stack:
        job = _Saving(run, step, tensors, ranks, stack)
        openings = agree(ranks, job.open, _Opening, TRAVELS, _failed)
        folder = next(Path(opening.folder) for opening in openings if opening.folder)
        total_bytes = sum(opening.num_bytes for opening in openings)
        entries = agree(ranks, lambda: job.write(folder, total_bytes), FileEntry, TRAVELS, _failed)
        files = {rank_file(rank): entry for rank, entry in enumerate(entries)}
        manifest = CheckpointManifest(step, step, layout, model, files, time.monotonic() - started_s, step_s)
        # Rank 0's, whose clock counts.
        committed = agree(ranks, lambda: job.commit(manifest), CheckpointManifest, TRAVELS, _failed)[0]
    return Checkpoint(step, run.checkpoint(step), committed, run.attempt)


def _failed(described: str) -> SaveError:
    return SaveError(f"saving failed on {described}")


@dataclass(frozen=True)
class _Opening:
    """First exchange: how much a rank will write; rank 0 adds the temporary folder that it made."""

    num_bytes: int
    folder: str


@dataclass
class _Saving:
    """One rank's share of one checkpoint."""

    run: RunDir
    step: int
    tensors: Mapping[str, torch.Tensor]
    ranks: RankGroup
    stack: ExitStack
    publication: Publication | None = None
    available_bytes: int = 0

    def open(self) -> _Opening:
        """Rank 0 makes the folder: several clients of one filesystem that make the same one can get in each other's way."""
        num_bytes = file_bytes(self.tensors)
        if self.ranks.rank != 0:
            return _Opening(num_bytes, "")
        sweep_leftovers(self.run, self.run.checkpoints)
        self.available_bytes = _available_bytes(self.run.checkpoints)  # now, before any rank takes of it
        with _space_checked(self.run.checkpoints, 0):
            self.publication = self.stack.enter_context(self.run.publishing(self.run.checkpoint(self.step)))
        return _Opening(num_bytes, str(self.publication.path))

    def write(self, folder: Path, total_bytes: int) -> FileEntry:
        wanted = total_bytes + _MANIFEST_BYTES_ALLOWANCE
        if self.ranks.rank == 0 and self.available_bytes < wanted:
            raise NoCheckpointSpaceError(str(self.run.checkpoints), wanted, self.available_bytes)
        with _space_checked(folder, wanted):
            return write_tensors(folder / rank_file(self.ranks.rank), self.tensors)

    def commit(self, manifest: CheckpointManifest) -> CheckpointManifest:
        if self.publication is not None:
            with _space_checked(self.run.checkpoints, manifest.total_bytes):
                self.publication.commit(manifest.to_record())
        return manifest


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
            raise NoCheckpointSpaceError(str(folder), wanted_bytes, _available_bytes(folder)) from problem
        raise
