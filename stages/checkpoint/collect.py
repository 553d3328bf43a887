"""Deletion of old checkpoints. One owner: rank 0 of the trainer, after a save and before training goes on."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from stages.checkpoint.errors import DamagedCheckpointError
from stages.checkpoint.find import read
from stages.files import list_names, remove_tree
from stages.rundir import RunDir

_DAMAGED_NAME = re.compile(r"^damaged_step_(\d{6,})$")


def collect_checkpoints(run: RunDir, keep: int) -> tuple[int, ...]:
    """Delete all but the newest `keep` whole checkpoints; returns the steps of those that went.

    A damaged one does not count among the kept, so the last good one stays whatever is newer. Folders that `set_aside` left
    go with the first whole checkpoint that is newer than they.
    """
    whole = [step for step in sorted(run.published_checkpoints(), reverse=True) if _is_whole(run, step)]
    if not whole:
        return ()
    oldest_kept = whole[:keep][-1]
    old = tuple(step for step in run.published_checkpoints() if step < oldest_kept)
    for step in old:
        _remove(run, run.checkpoint(step))
    for name in list_names(run.checkpoints):
        if (match := _DAMAGED_NAME.match(name)) and int(match[1]) < whole[0]:
            _remove(run, run.checkpoints / name)
    return old


def set_aside(run: RunDir, newer_than: int) -> tuple[int, ...]:
    """Rename what lies beyond the step that training goes on from to damaged_step_N: damaged, or of a line that was left.

    Nothing finds them as checkpoints any more: resumed from later, they would not fit the ledger.
    """
    beyond = tuple(sorted(step for step in run.published_checkpoints() if step > newer_than))
    for step in beyond:
        run.check_fence()
        aside = run.checkpoints / f"damaged_{run.checkpoint(step).name}"
        if aside.name in list_names(run.checkpoints):
            _remove(run, aside)
        os.rename(run.checkpoint(step), aside)
    return beyond


def _is_whole(run: RunDir, step: int) -> bool:
    try:
        read(run, step)
    except DamagedCheckpointError:
        return False
    return True


def _remove(run: RunDir, folder: Path) -> None:
    """Rename first, so that no reader finds half a folder; a crash in between leaves trash for the next sweep."""
    run.check_fence()
    trash = folder.with_name(f".{folder.name.removeprefix('damaged_')}.trash-{secrets.token_hex(4)}")
    os.rename(folder, trash)
    remove_tree(trash)
