"""Lines of text about the weights of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from stages.rundir import RunDir
from stages.weights.errors import WeightsError
from stages.weights.instances import read_statuses
from stages.weights.manifest import Manifest, TensorEntry
from stages.weights.reader import load_manifest, read_verified

_RECENT = 5


def inspect_lines(run: RunDir) -> list[str]:
    """Published versions, instances with what they serve and lease, the newest refreshes."""
    lines = [f"run {run.run_id}, attempt {run.attempt}, {run.root}", "", *_published(run), "", *_instances(run), ""]
    return [*lines, *_refreshes(run)]


def describe_difference(run: RunDir, first: int, second: int) -> list[str]:
    """Tensors whose bytes differ between two versions, with the largest absolute difference; raises what the reader raises."""
    one, two = load_manifest(run, first), load_manifest(run, second)
    rows = []
    for name in sorted(one.tensors.keys() | two.tensors.keys()):
        change = _change(run, one, two, name)
        if change:
            rows.append((name, *change))
    summary = (
        f"{len(rows)} of {len(one.tensors.keys() | two.tensors.keys())} tensors differ between {first} and {second}"
    )
    if not rows:
        return [summary]
    return [*_table(("tensor", "elements", "changed", "max abs difference"), rows), summary]


def _published(run: RunDir) -> list[str]:
    latest = run.read(run.latest_json, any_attempt=True)
    newest = latest["version"] if latest else None
    rows = [_version_row(run, version, version == newest) for version in run.published_versions()]
    return (
        _table(("version", "attempt", "digest", "tensors", "files", "bytes", ""), rows)
        if rows
        else ["no weights published"]
    )


def _version_row(run: RunDir, version: int, newest: bool) -> tuple[str, ...]:
    note = "newest" if newest else ""
    try:
        manifest = load_manifest(run, version)
    except WeightsError as problem:
        return str(version), "", "", "", "", "", f"{note} {problem}".strip()
    record = run.manifest(run.weights_version(version)) or {}
    counts = (f"{len(manifest.tensors)}", f"{len(manifest.files)}", f"{manifest.total_bytes:,}")
    return str(version), str(record.get("attempt")), manifest.digest, *counts, note


def _instances(run: RunDir) -> list[str]:
    rows = [
        (
            status.instance,
            status.state,
            str(status.version),
            status.manifest_digest or "-",
            status.host,
            str(status.heartbeat),
            ", ".join(map(str, status.leases)) or "-",
        )
        for status in read_statuses(run).values()
    ]
    titles = ("instance", "state", "version", "digest", "host", "heartbeat", "leases")
    return _table(titles, rows) if rows else ["no instance has registered in this attempt"]


def _refreshes(run: RunDir) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for version in reversed(run.published_versions()):
        record = run.read(run.refreshed_json(version), any_attempt=True)
        if record is not None and len(rows) < _RECENT:
            slowest = record["slowest"]
            seconds = (record["publish_s"], record["refresh_s"], slowest["total_reload_s"], slowest["paused_s"])
            rows.append((str(version), *(f"{value:.3f}" for value in seconds), slowest["instance"]))
    titles = ("refreshed", "publish s", "refresh s", "slowest reload s", "its pause s", "slowest instance")
    return _table(titles, rows) if rows else ["no refresh completed for a version that still exists"]


def _change(run: RunDir, one: Manifest, two: Manifest, name: str) -> tuple[str, str, str] | None:
    """(elements, changed elements, largest difference) of one tensor; None when equal."""
    if name not in one.tensors or name not in two.tensors:
        return "", "", f"only in version {one.version if name in one.tensors else two.version}"
    first, second = one.tensors[name], two.tensors[name]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return "", "", f"{_kind(first)} became {_kind(second)}"
    if first.xxh3_128 == second.xxh3_128 and [p.box for p in first.parts] == [p.box for p in second.parts]:
        return None
    before, after = (read_verified(run, manifest, [name], threads=1)[name] for manifest in (one, two))
    changed = int((_by_element(before) != _by_element(after)).any(dim=1).sum())
    difference = (after.to(torch.float64) - before.to(torch.float64)).abs().max().item() if before.numel() else 0.0
    return (f"{before.numel():,}", f"{changed:,}", f"{difference:.3e}") if changed else None


def _by_element(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of each element, uint8[elements, width]: a NaN equals itself, -0.0 differs from 0.0."""
    return tensor.reshape(-1, 1).view(torch.uint8)


def _kind(entry: TensorEntry) -> str:
    return f"{entry.dtype}{list(entry.shape)}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [list(titles), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
