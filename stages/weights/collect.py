"""Deletion of what nobody needs any more. One owner: rank 0 of the trainer, between two refreshes.

What it does not know, such as a symbolic link or a file that somebody put beside the versions, it leaves alone. What it
cannot delete stays, and is named: that costs space, and is no reason to end a run.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from conf.sections import WeightsConfig
from stages.context import StageContext
from stages.files import DamagedRecordError, is_own_temporary, list_names, remove_tree
from stages.rundir import FencedError, RunDir
from stages.weights import spares
from stages.weights.delta_entry import DeltaEntry
from stages.weights.errors import RecordError
from stages.weights.fields import Fields
from stages.weights.instances import read_statuses

_RECORD_NAME = re.compile(r"^v(\d{6,})\.json$")
_LEFTOVER_FOLDER = re.compile(r"^\.(?:v|step_)\d{6,}\.(?:(?:tmp|spare)-(?P<attempt>\d+)-[0-9a-f]+|trash-[0-9a-f]+)$")
_LEFTOVER_RECORD = re.compile(r"^\.(?:LATEST|v\d{6,})\.json\.[0-9a-f-]+\.tmp$")

_told: set[str] = set()
"""What this process has said that it leaves alone; each collection finds it again."""


@dataclass(frozen=True)
class Collected:
    """What one collection removed."""

    versions: tuple[int, ...]
    batches: tuple[int, ...]
    records: tuple[str, ...]
    leftovers: tuple[str, ...]
    left_alone: tuple[str, ...] = ()
    """What could not be deleted, or might be in use, each with the reason."""


def collect(context: StageContext, *, batches_before: int | None = None) -> Collected:
    """Delete old weight versions, trained batches and refresh records of a run, within the limits of its configuration.

    The files of one version may stay without its name, to be written over by the next (`stages.weights.spares`).

    Kept whatever their age: versions that an instance leases, that LATEST.json names, that a request waits for, and those that
    the kept ones are deltas of; batches without a receipt, or from step `batches_before` on (a checkpoint may want to train
    them again). ACK files are never deleted: they are small, and the proof of what was served when. Raises FencedError.
    """
    run, options = context.run, context.config.weights
    trash = _Trash(run)
    collected = Collected(
        versions=_collect_versions(context, trash, options.keep_versions),
        batches=_collect_batches(run, trash, options.keep_batches, batches_before),
        records=_collect_records(run, options),
        leftovers=tuple(
            name
            for folder in (run.weights, run.batches, run.requests, run.refreshed)
            for name in sweep_leftovers(run, folder)
        ),
        left_alone=tuple(trash.left_alone),
    )
    for reason in collected.left_alone:
        if reason not in _told:
            _told.add(reason)
            print(f"collection: {reason}", flush=True)
    return collected


def drop_versions(run: RunDir, newer_than: int) -> tuple[int, ...]:
    """Delete the versions that an older attempt published beyond the step that training now goes on from.

    LATEST.json goes first when it names one of them, or nothing: a pointer is missing rather than wrong. Leases of older attempts are void.
    """
    beyond = tuple(sorted(version for version in run.published_versions() if version > newer_than))
    latest = run.read(run.latest_json, any_attempt=True, skip_damaged=True)
    if run.latest_json.name in list_names(run.weights) and (latest is None or latest["version"] > newer_than):
        run.check_fence()
        run.latest_json.unlink()
    trash = _Trash(run)
    for version in beyond:
        trash.remove(run.weights_version(version))
    return beyond


def sweep_leftovers(run: RunDir, folder: Path) -> tuple[str, ...]:
    """Remove what a killed process left in `folder`: half publications and spares of older attempts, trash, half records.

    All of these have one writer, the trainer's first rank: records that this very process is writing in another thread are
    known by their names.
    """
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    removed = []
    for name in names:
        is_record = bool(_LEFTOVER_RECORD.match(name)) and not is_own_temporary(name)
        match = _LEFTOVER_FOLDER.match(name)
        is_folder = match is not None and int(match["attempt"] or -1) < run.attempt
        if (is_record or is_folder) and _try_to_delete(folder / name) is None:
            removed.append(name)
    return tuple(removed)


def _collect_versions(context: StageContext, trash: _Trash, keep: int) -> tuple[int, ...]:
    """Versions above LATEST.json belong to an older attempt that got further than its last checkpoint: they go too."""
    run = context.run
    latest = run.read(run.latest_json, any_attempt=True, skip_damaged=True)
    if latest is None:
        return ()
    published = sorted(run.published_versions())
    newest = [version for version in published if version <= latest["version"]][-keep:]
    needed = {*newest, latest["version"], *_requested(run, published)}
    removed: list[int] = []
    # Most versions of changes are small, and rarely written in full.
    keeps = partial(spares.keep, run) if context.config.weights.delta == "off" else None
    try:
        needed = _with_bases(run, needed) if needed < set(published) else needed
        old = [version for version in published if version not in needed]
        leased = _leased(context) if old else set()
        for version in (version for version in old if version not in leased):
            if trash.remove(run.weights_version(version), partial(_is_leased, context, version), keeps):
                removed.append(version)
    except (RecordError, DamagedRecordError) as damage:
        trash.left_alone.append(f"weights: versions may be in use, none more is collected: {damage}")
    return tuple(removed)


def _leased(context: StageContext) -> set[int]:
    """Raises RecordError, DamagedRecordError for a registration of an instance of the plan that cannot be read."""
    names = [placement.name for placement in context.plan.rollout.instances]
    statuses = read_statuses(context.run, names, skip_damaged=False)
    leased = {version for status in statuses.values() for version in (*status.leases, status.version)}
    return _with_bases(context.run, leased)


def _with_bases(run: RunDir, versions: Iterable[int]) -> set[int]:
    """And the versions that these are published as deltas of, and so on. Raises RecordError, DamagedRecordError.

    The base of one that does not exist (any more) is not known, and of no use.
    """
    found, left = set(versions), list(versions)
    while left:
        version = left.pop()
        record = run.manifest(run.weights_version(version)) if version >= 0 else None
        if record is None or "delta" not in record:
            continue
        base = DeltaEntry.from_record(Fields(record, f"manifest of version {version}").mapping("delta"), "delta").base
        if base.version not in found:
            found.add(base.version)
            left.append(base.version)
    return found


def _is_leased(context: StageContext, version: int) -> bool:
    return version in _leased(context)


def _requested(run: RunDir, published: Iterable[int]) -> set[int]:
    """Versions that this attempt asked for and that have not been proved by all."""
    return {
        version
        for version in published
        if run.read(run.request_json(version), skip_damaged=True) is not None
        and run.read(run.refreshed_json(version), skip_damaged=True) is None
    }


def _versions(folder: Path) -> set[int]:
    return {int(match[1]) for name in list_names(folder) if (match := _RECORD_NAME.match(name))}


def _collect_batches(run: RunDir, trash: _Trash, keep: int, before: int | None) -> tuple[int, ...]:
    """Batches with a receipt below step `before`, but not the newest `keep` of all."""
    steps = sorted(run.published_batches())
    candidates = (step for step in steps[:-keep] if before is None or step < before)
    folders = ((step, run.batch(step)) for step in candidates)
    return tuple(
        step
        for step, folder in folders
        if _is_folder(folder) and "trained.json" in list_names(folder) and trash.remove(folder)
    )


def _collect_records(run: RunDir, options: WeightsConfig) -> tuple[str, ...]:
    removed = []
    for folder in (run.requests, run.refreshed):
        for version in sorted(_versions(folder))[: -options.keep_records]:
            path = folder / f"v{version:06d}.json"
            path.unlink(missing_ok=True)
            removed.append(str(path.relative_to(run.root)))
    return tuple(removed)


@dataclass
class _Trash:
    """Deletes folders: renames first, so that no reader finds half of one; a crash in between leaves it for the next sweep."""

    run: RunDir
    left_alone: list[str] = field(default_factory=list)

    def remove(
        self,
        folder: Path,
        is_needed: Callable[[], bool] | None = None,
        keep: Callable[[Path], bool] | None = None,
    ) -> bool:
        """False when it stays. `is_needed` is asked once the folder has lost its name: whoever took a lease before that is seen,
        and whoever comes later does not find the folder. What `keep` takes for another use is not deleted.

        Raises FencedError when a newer attempt of the run began meanwhile: the folder is its, and keeps its name.
        """
        self.run.check_fence()
        if not _is_folder(folder):
            self.left_alone.append(f"{folder}: no folder, not made by this run")
            return False
        trash = folder.with_name(f".{folder.name}.trash-{secrets.token_hex(4)}")
        try:
            os.rename(folder, trash)
        except OSError as problem:
            self.left_alone.append(f"{folder}: {problem}")
            return False
        if self._must_return(trash, folder, is_needed):
            os.rename(trash, folder)
            return False
        if (obstacle := _try_to_delete(trash, keep)) is not None:
            self.left_alone.append(f"{folder}: {obstacle}")
        return True

    def _must_return(self, trash: Path, folder: Path, is_needed: Callable[[], bool] | None) -> bool:
        try:
            self.run.check_fence()
            return is_needed is not None and is_needed()
        except (FencedError, RecordError, DamagedRecordError):
            os.rename(trash, folder)
            raise


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _try_to_delete(path: Path, keep: Callable[[Path], bool] | None = None) -> OSError | None:
    """Delete a file or a folder, unless `keep` takes it; what stood in the way when it stays (something in it is open, or not ours)."""
    try:
        if keep is not None and keep(path):
            return None
        if _is_folder(path):
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as problem:
        return problem
    return None
