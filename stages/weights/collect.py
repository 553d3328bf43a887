"""Deletion of what nobody needs any more. One owner: rank 0 of the trainer, between two refreshes."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from conf.sections import WeightsConfig
from stages.context import StageContext
from stages.files import list_names, remove_tree
from stages.rundir import RunDir
from stages.weights.instances import read_statuses

_RECORD_NAME = re.compile(r"^v(\d{6,})\.json$")
_LEFTOVER_FOLDER = re.compile(r"^\.(?:v|step_)\d{6,}\.(?:tmp-(?P<attempt>\d+)-[0-9a-f]+|trash-[0-9a-f]+)$")
_LEFTOVER_RECORD = re.compile(r"^\.(?:LATEST|v\d{6,})\.json\.[0-9a-f]+\.tmp$")


@dataclass(frozen=True)
class Collected:
    """What one collection removed."""

    versions: tuple[int, ...]
    batches: tuple[int, ...]
    records: tuple[str, ...]
    leftovers: tuple[str, ...]


def collect(context: StageContext, *, batches_before: int | None = None) -> Collected:
    """Delete old weight versions, trained batches and refresh records of a run, within the limits of its configuration.

    Kept whatever their age: versions that an instance leases, that LATEST.json names, that a request waits for; batches
    without a receipt, or from step `batches_before` on (a checkpoint may want to train them again). ACK files are never
    deleted: they are small, and the proof of what was served when.
    """
    run, options = context.run, context.config.weights
    return Collected(
        versions=_collect_versions(run, options.keep_versions),
        batches=_collect_batches(run, options.keep_batches, batches_before),
        records=_collect_records(run, options),
        leftovers=tuple(
            name
            for folder in (run.weights, run.batches, run.requests, run.refreshed)
            for name in sweep_leftovers(run, folder)
        ),
    )


def drop_versions(run: RunDir, newer_than: int) -> tuple[int, ...]:
    """Delete the versions that an older attempt published beyond the step that training now goes on from.

    LATEST.json goes first when it names one of them: a pointer is missing rather than wrong. Leases of older attempts are void.
    """
    beyond = tuple(sorted(version for version in run.published_versions() if version > newer_than))
    latest = run.read(run.latest_json, any_attempt=True)
    if latest is not None and latest["version"] > newer_than:
        run.check_fence()
        run.latest_json.unlink()
    _remove(run, (run.weights_version(version) for version in beyond))
    return beyond


def sweep_leftovers(run: RunDir, folder: Path) -> tuple[str, ...]:
    """Remove what a killed process left in `folder`: half publications of older attempts, trash, half records.

    Half records are those of this process's own writer (LATEST.json, requests, results), which writes none right now.
    """
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    removed = []
    for name in names:
        if _LEFTOVER_RECORD.match(name):
            (folder / name).unlink(missing_ok=True)
        elif (match := _LEFTOVER_FOLDER.match(name)) and int(match["attempt"] or -1) < run.attempt:
            remove_tree(folder / name)
        else:
            continue
        removed.append(name)
    return tuple(removed)


def _collect_versions(run: RunDir, keep: int) -> tuple[int, ...]:
    """Versions above LATEST.json belong to an older attempt that got further than its last checkpoint: they go too."""
    latest = run.read(run.latest_json, any_attempt=True)
    if latest is None:
        return ()
    published = sorted(run.published_versions())
    newest = [version for version in published if version <= latest["version"]][-keep:]
    needed = {*newest, latest["version"], *_leased(run), *_requested(run, published)}
    old = tuple(version for version in published if version not in needed)
    _remove(run, (run.weights_version(version) for version in old))
    return old


def _leased(run: RunDir) -> set[int]:
    return {version for status in read_statuses(run).values() for version in (*status.leases, status.version)}


def _requested(run: RunDir, published: Iterable[int]) -> set[int]:
    """Versions that this attempt asked for and that have not been proved by all."""
    return {
        version
        for version in published
        if run.read(run.request_json(version)) is not None and run.read(run.refreshed_json(version)) is None
    }


def _versions(folder: Path) -> set[int]:
    return {int(match[1]) for name in list_names(folder) if (match := _RECORD_NAME.match(name))}


def _collect_batches(run: RunDir, keep: int, before: int | None) -> tuple[int, ...]:
    """Batches with a receipt below step `before`, but not the newest `keep` of all."""
    steps = sorted(run.published_batches())
    candidates = (step for step in steps[:-keep] if before is None or step < before)
    old = tuple(step for step in candidates if "trained.json" in list_names(run.batch(step)))
    _remove(run, (run.batch(step) for step in old))
    return old


def _collect_records(run: RunDir, options: WeightsConfig) -> tuple[str, ...]:
    removed = []
    for folder in (run.requests, run.refreshed):
        for version in sorted(_versions(folder))[: -options.keep_records]:
            path = folder / f"v{version:06d}.json"
            path.unlink(missing_ok=True)
            removed.append(str(path.relative_to(run.root)))
    return tuple(removed)


def _remove(run: RunDir, folders: Iterable[Path]) -> None:
    """Rename first, so that no reader finds half a folder; a crash in between leaves trash for the next sweep."""
    for folder in folders:
        run.check_fence()
        trash = folder.with_name(f".{folder.name}.trash-{secrets.token_hex(4)}")
        os.rename(folder, trash)
        remove_tree(trash)
