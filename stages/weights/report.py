"""Lines of text about the weights of a run. What is damaged is a line too, beside what is sound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.files import DamagedRecordError, names_if_any
from stages.rundir import RunDir
from stages.weights.errors import WeightsError
from stages.weights.instances import InstanceStatus, read_status
from stages.weights.manifest import Manifest
from stages.weights.reader import load_manifest
from stages.weights.records import PARTS, RefreshRequest
from stages.weights.table import table

_RECENT = 5
_MISSING = "?"
"""Stands where a record lacks a field: an older Libra wrote it."""
DAMAGE = (WeightsError, DamagedRecordError, OSError)


def inspect_lines(run: RunDir, moves: Mapping[str, bool], *, is_over: bool = False) -> list[str]:
    """Published versions, instances with what they serve and lease, requests without answer, the newest refreshes.

    `moves` says of which instances the heartbeat moved while somebody looked. A run that `is_over` has none any more.
    """
    blocks = [_published(run), _instances(run, moves, is_over), _pending(run), _refreshes(run)]
    return [line for block in blocks if block for line in ("", *block)]


def newest_version(run: RunDir) -> int | None:
    """What LATEST.json names; None when nothing is published. Raises WeightsError when it is missing or damaged."""
    try:
        latest = run.read(run.latest_json, any_attempt=True)
    except DAMAGE as problem:
        raise WeightsError(f"{problem}; published are {published_numbers(run)}") from problem
    if latest is None:
        if run.published_versions():
            raise WeightsError(
                f"{run.latest_json} is missing or of another run; published are {published_numbers(run)}"
            )
        return None
    version = latest.get("version")
    if type(version) is not int:
        raise WeightsError(f"{run.latest_json} names version {version!r}; published are {published_numbers(run)}")
    return version


def published_numbers(run: RunDir) -> str:
    return ", ".join(map(str, sorted(run.published_versions()))) or "no versions"


def _published(run: RunDir) -> list[str]:
    newest, lines = None, []
    try:
        newest = newest_version(run)
        if newest is not None and newest not in run.published_versions():
            lines.append(f"LATEST.json names version {newest}, which does not exist")
    except WeightsError as problem:
        lines.append(str(problem))
    rows = [_version_row(run, version, version == newest) for version in sorted(run.published_versions())]
    titles = ("version", "attempt", "published by", "digest", "tensors", "files", "bytes", "")
    return [*(table(titles, rows) if rows else ["no weights published"]), *lines]


def _version_row(run: RunDir, version: int, newest: bool) -> tuple[str, ...]:
    note = "newest" if newest else ""
    try:
        manifest, stamps = load_manifest(run, version), run.manifest(run.weights_version(version)) or {}
    except DAMAGE as problem:
        return str(version), "", "", "", "", "", "", f"{note} {problem}".strip()
    by = (str(stamps.get("attempt", _MISSING)), str(stamps.get("writer", _MISSING)))
    if manifest.delta is not None:
        note = f"{note} delta of {manifest.delta.base.version}".strip()
    return str(version), *by, manifest.digest, *_counts(manifest), note


def _counts(manifest: Manifest) -> tuple[str, ...]:
    return f"{len(manifest.tensors)}", f"{len(manifest.files)}", f"{manifest.total_bytes:,}"


def _instances(run: RunDir, moves: Mapping[str, bool], is_over: bool) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for name in _records(run.instances):
        try:
            status = read_status(run, name, skip_damaged=False)
        except DAMAGE as problem:
            rows.append((name, "damaged", "", "", "", "", "", str(problem)))
        else:
            rows += [] if status is None else [_instance_row(status, moves.get(name), is_over)]
    titles = ("instance", "state", "version", "digest", "host", "heartbeat", "leases", "")
    return table(titles, rows) if rows else [f"no instance has registered in attempt {run.attempt}"]


def _instance_row(status: InstanceStatus, moves: bool | None, is_over: bool) -> tuple[str, ...]:
    beat = {None: "", True: ", moves", False: ", stands still"}[moves]
    last_word = "stopped" if status.state == "stopping" else f"gone, was {status.state}"
    return (
        status.instance,
        last_word if is_over and not moves else status.state,
        "none proved" if status.version < 0 else str(status.version),
        status.manifest_digest or "-",
        status.host,
        f"{status.heartbeat}{beat}",
        ", ".join(map(str, status.leases)) or "-",
        "",
    )


def _pending(run: RunDir) -> list[str]:
    """The newest request of this attempt, when not everybody that it names has answered."""
    for version in sorted(_versions(run.requests), reverse=True):
        try:
            record = run.read(run.request_json(version))
            if record is None:
                continue
            if run.read(run.refreshed_json(version)) is not None:
                return []
            request = RefreshRequest.from_record(record, f"request for version {version}")
        except DAMAGE as problem:
            return [f"request for version {version}: {problem}"]
        words = "; ".join(f"{name}: {_answer(run, version, name)}" for name in request.instances)
        return [f"asked for version {version} ({request.method}, within {request.deadline_s:.0f} s): {words}"]
    return []


def _answer(run: RunDir, version: int, instance: str) -> str:
    for phase in ("loaded", "nack", "prepared"):
        try:
            record = run.read(run.ack_json(version, instance, phase))
        except DAMAGE as problem:
            return str(problem)
        if record is not None:
            return f"refused ({record.get('phase')}): {record.get('error')}" if phase == "nack" else phase
    return "no answer yet"


def _refreshes(run: RunDir) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for version in sorted(_versions(run.refreshed), reverse=True)[:_RECENT]:
        try:
            record = run.read(run.refreshed_json(version), any_attempt=True)
        except DAMAGE as problem:
            rows.append((str(version), *[""] * (4 + len(PARTS)), str(problem)))
        else:
            rows += [] if record is None else [_refresh_row(version, record)]
    titles = ("refreshed", "publish s", "refresh s", "slowest instance", "reload s")
    parts = (name.removesuffix("_s").replace("_", " ") + " s" for name in PARTS)
    return table((*titles, *parts, ""), rows) if rows else ["no refresh has been completed"]


def _refresh_row(version: int, record: Mapping[str, Any]) -> tuple[str, ...]:
    found = record.get("slowest")
    slowest: Mapping[str, Any] = found if isinstance(found, dict) else {}
    instance = f"{slowest.get('instance', _MISSING)} on {slowest.get('host', _MISSING)}"
    seconds = [_seconds(slowest.get(name)) for name in ("total_reload_s", *PARTS)]
    left_out = record.get("quarantined") or {}
    note = f"without {', '.join(sorted(left_out))}" if left_out else ""
    return str(version), _seconds(record.get("publish_s")), _seconds(record.get("refresh_s")), instance, *seconds, note


def _seconds(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else _MISSING


def _records(folder: Path) -> list[str]:
    return [name.removesuffix(".json") for name in names_if_any(folder) if name.endswith(".json")]


def _versions(folder: Path) -> list[int]:
    names = (name.removeprefix("v") for name in _records(folder) if name.startswith("v"))
    return [int(number) for number in names if number.isdigit()]
