"""What a run has done so far, in numbers: steps, reward, weights, instances, checkpoints, where the time goes, disk.

Everything is read from the ends of files, and folders are walked within a budget, so that the answer comes at once for a long run.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from launch.runs import Folder
from launch.truth import Truth
from stages.checkpoint import available
from stages.checkpoint.find import Checkpoint
from stages.files import DamagedRecordError, names_if_any

WINDOW_STEPS = 20
TAIL_BYTES = 256 << 10
DISK_BUDGET_S = 0.4


@dataclass(frozen=True)
class Progress:
    """`done` optimizer steps of `total` (0: not known). Rates are means over the last WINDOW_STEPS steps that count."""

    done: int = 0
    total: int = 0
    reward: float | None = None
    step_s: float | None = None
    eta_s: float | None = None
    refresh_s: float | None = None
    tokens_per_s: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    window: int = 0


@dataclass(frozen=True)
class Saved:
    """The newest sound checkpoint; `behind` steps were trained since. `damaged` says what is wrong with newer ones."""

    step: int | None = None
    behind: int = 0
    bytes: int = 0
    save_s: float = 0.0
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Instance:
    """`beats`: did its counter move while it was watched; None when nobody watched."""

    name: str
    state: str
    version: int
    host: str
    beats: bool | None


@dataclass(frozen=True)
class Disk:
    """Bytes of all files of the run; `is_whole` is False when the budget ended before the last one."""

    bytes: int
    is_whole: bool


def progress(folder: Folder) -> Progress:
    records = list(tail_records(folder.run.metrics_jsonl))
    steps = list(counting_steps(records).values())[-WINDOW_STEPS:]
    summary = folder.record(folder.run.summary_json, any_attempt=True) or {}
    if not steps:
        resumed = [int(record["from_step"]) for record in records if record.get("event") == "resumed"]
        return Progress((resumed or [0])[-1], total_steps(folder), seconds=_totals(summary))
    last = steps[-1]
    step_s = fmean(float(step["step_s"]) for step in steps)
    done, total = int(last["step"]) + 1, int(last["total_steps"])
    synced = [float(step["sync_s"]) for step in steps if step.get("sync_s")]
    return Progress(
        done=done,
        total=total,
        reward=float(last["reward"]),
        step_s=step_s,
        eta_s=(total - done) * step_s,
        refresh_s=synced[-1] if synced else None,
        tokens_per_s=float(last["tokens_per_s"]),
        seconds=_totals(summary) or _means(steps),
        window=0 if summary else len(steps),
    )


def counting_steps(records: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Step -> its line in metrics.jsonl, in order. Lines beyond the step that a later attempt went on from do not count."""
    steps: dict[int, Mapping[str, Any]] = {}
    for record in records:
        if record.get("event") == "resumed":
            steps = {step: line for step, line in steps.items() if step < int(record["from_step"])}
        elif "event" not in record and "step" in record:
            steps.pop(int(record["step"]), None)
            steps[int(record["step"])] = record
    return steps


def tail_records(path: Path, most_bytes: int = TAIL_BYTES) -> Iterator[dict[str, Any]]:
    """Whole lines at the end of a JSON-lines file; lines that are no objects are left out. None where it cannot be read."""
    try:
        with open(path, "rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, size - most_bytes))
            data = handle.read()
    except OSError:
        return
    lines = data.split(b"\n")
    for line in lines[1 if size > most_bytes else 0 :]:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # half a line of a writer that was killed, or that writes now
        if isinstance(record, dict):
            yield record


def _means(steps: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each phase of one step: the trainer's phases, and generation, which overlaps them."""
    found: dict[str, list[float]] = {}
    for step in steps:
        seconds = {"generate": step.get("generate_s"), **step.get("seconds", {})}
        for name, value in seconds.items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append(float(value))
    return {name: fmean(values) for name, values in found.items()}


def _totals(summary: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in (summary.get("phase_s") or {}).items() if name != "steps"}


def total_steps(folder: Folder) -> int:
    """From config.yaml: before the first step no other file says it. 0 when it cannot be read."""
    import yaml
    from omegaconf.errors import OmegaConfBaseException

    from conf.load import load

    try:
        return load(folder.run.config_yaml).total_steps
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        return 0


def saved(folder: Folder, done: int) -> Saved:
    try:
        found = available(folder.run) if folder.run.run_id else []
    except (OSError, DamagedRecordError) as error:
        return Saved(damaged=(str(error),))
    damaged: list[str] = []
    for one in found:
        if isinstance(one, Checkpoint):
            manifest = one.manifest
            behind = max(0, done - one.step)
            return Saved(one.step, behind, manifest.total_bytes, manifest.save_s, tuple(damaged))
        damaged.append(str(one))
    return Saved(damaged=tuple(damaged))


def newest_version(folder: Folder) -> int | None:
    record = folder.record(folder.run.latest_json, any_attempt=True) or {}
    return int(record["version"]) if "version" in record else None


def instances(truth: Truth) -> list[Instance]:
    """Those that registered in the newest attempt."""
    folder = truth.folder
    records = {
        name.removesuffix(".json"): folder.record(folder.run.instances / name)
        for name in names_if_any(folder.run.instances)
    }
    watched = truth.beats.instances
    return [
        Instance(
            name, str(record.get("state")), int(record.get("version", -1)), str(record.get("host")), watched.get(name)
        )
        for name, record in records.items()
        if record is not None
    ]


def disk(root: Path, budget_s: float = DISK_BUDGET_S) -> Disk:
    """What the run's files take; links are not followed."""
    end_s = time.monotonic() + budget_s
    total, folders = 0, [str(root)]
    while folders:
        if time.monotonic() > end_s:
            return Disk(total, is_whole=False)
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except (FileNotFoundError, PermissionError):
            continue  # collected while we looked, or not ours to look into
    return Disk(total, is_whole=True)


def experiment(folder: Folder) -> str:
    """Name of the experiment's file that set options of the run, as config.yaml tells it; "" when none did."""
    try:
        text = folder.run.config_yaml.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"  # .*?\bexperiment/(\S+?)\.yaml", text)
    return found[1] if found else ""
