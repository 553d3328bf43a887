"""Load the newest checkpoint that is what it should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from stages.checkpoint.errors import TRAVELS, DamagedCheckpointError, LoadError, NoSoundCheckpointError
from stages.checkpoint.find import Checkpoint, read
from stages.checkpoint.fingerprint import check_fits
from stages.checkpoint.manifest import Fingerprint, Layout
from stages.checkpoint.tensors import read_tensors
from stages.rundir import RunDir
from stages.weights.ranks import RankGroup, agree, first_rank_says


def steps_to_try(run: RunDir, ranks: RankGroup) -> tuple[int, ...]:
    """Steps of all checkpoints, newest first, as rank 0 sees them: ranks that looked themselves could differ."""
    seen = tuple(sorted(run.published_checkpoints(), reverse=True)) if ranks.rank == 0 else ()
    return first_rank_says(ranks, seen, tuple[int, ...])


def load_newest(
    run: RunDir,
    steps: Sequence[int],
    *,
    into: Mapping[str, torch.Tensor],
    layout: Layout,
    model: Fingerprint,
    ranks: RankGroup,
    tell: Callable[[str], None] = print,
) -> Checkpoint:
    """Fill `into` with this rank's file of the newest sound checkpoint among `steps`; collective over `ranks`.

    A checkpoint that is damaged on any rank is passed over by all, with a warning through `tell`. Raises
    NoSoundCheckpointError when none is left, CheckpointMismatchError for a sound one that this run cannot go on from,
    LoadError for any other failure; always on all ranks.
    """
    for step in steps:
        try:
            agree(ranks, partial(_load, run, step, into, layout, model, ranks), None, TRAVELS, _failed)
            return read(run, step)
        except DamagedCheckpointError as damage:
            tell(f"warning: {damage}; trying an older one")
    raise NoSoundCheckpointError(str(run.checkpoints), tuple(steps))


def _load(
    run: RunDir, step: int, into: Mapping[str, torch.Tensor], layout: Layout, model: Fingerprint, ranks: RankGroup
) -> None:
    checkpoint = read(run, step)
    check_fits(checkpoint, layout, model)
    path = checkpoint.rank_path(ranks.rank)
    read_tensors(path, checkpoint.manifest.files[path.name], into)


def _failed(described: str) -> LoadError:
    return LoadError(f"loading failed on {described}")
