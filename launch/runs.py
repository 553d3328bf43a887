"""Run directories as they are found, whatever is missing in them or damaged. Changes nothing.

Stages read through `stages.rundir.RunDir`, which refuses what is not whole. Here somebody asks what became of a run, and the
answer must come also from what is left of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.errors import LibraError
from launch.metrics import from_here
from stages.files import DamagedRecordError, names_if_any, read_json
from stages.rundir import SCHEMA_VERSION, RunDir

FOLDERS = ("instances", "weights", "control/requests", "control/refreshed", "batches", "ledger", "checkpoints")
"""What `RunDir.create` makes, and nothing ever removes."""
_TRACES = ("attempts", "weights", "control", "batches", "ledger", "checkpoints", "config.yaml", "plan.json")
_ENOUGH = 3
_DEPTH = 5


class NotARunError(LibraError):
    """What was named is no run directory."""

    exit_code = 2


@dataclass
class Folder:
    """One run directory, seen at one attempt. `identity` is run.json, empty when it is missing.

    `damage` names what is missing or unreadable, as far as was looked.
    """

    run: RunDir
    identity: dict[str, Any] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    unrecorded_job: str = ""
    """The attempt's job as Slurm knows it, where its launcher ended before it had written that down (`launch.unrecorded`)."""

    @classmethod
    def at(cls, root: Path) -> Folder:
        """Seen at the newest attempt. Raises NotARunError."""
        root = root.absolute()
        if not is_run(root):
            raise NotARunError(f"{root} is not a run directory: {_what_is(root)}")
        damage: list[str] = []
        identity = _read(root / "run.json", root, damage) or {}
        layout = identity.get("schema_version", SCHEMA_VERSION)
        if layout != SCHEMA_VERSION:
            raise NotARunError(f"{root} has layout {layout}; this version of Libra reads layout {SCHEMA_VERSION}")
        newest = max((int(name) for name in names_if_any(root / "attempts") if name.isdigit()), default=0)
        return cls(RunDir(root, str(identity.get("run_id", "")), newest, "reader"), identity, damage)

    @property
    def root(self) -> Path:
        return self.run.root

    def record(self, path: Path, *, any_attempt: bool = False) -> dict[str, Any] | None:
        """A record of this run; None when it is missing, of another run or attempt, or damaged. Damage is noted."""
        record = _read(path, self.root, self.damage)
        if record is None:
            return None
        if self.run.run_id and record.get("run_id") != self.run.run_id:
            self._note(f"{path.relative_to(self.root)} (of another run)")
            return None
        return record if any_attempt or record.get("attempt") == self.run.attempt else None

    def seen_at(self, attempt: int) -> Folder:
        """The same folder at another attempt; damage is noted in the same place."""
        return Folder(replace(self.run, attempt=attempt), self.identity, self.damage)

    @cached_property
    def state(self) -> dict[str, Any]:
        """What the supervisor of this attempt said last; empty when it said nothing."""
        return self.record(self.run.state_json) or {}

    @cached_property
    def submission(self) -> dict[str, Any]:
        return self.record(self.run.submission_json) or {}

    @cached_property
    def start(self) -> dict[str, Any]:
        """attempt.json: why this attempt was started, from which step. Empty for a first attempt that left none."""
        return self.record(self.run.attempt_json) or {}

    @property
    def attempts(self) -> list[int]:
        return sorted(int(name) for name in names_if_any(self.root / "attempts") if name.isdigit())

    @property
    def mode(self) -> str:
        """ "slurm" or "local"; "" when nobody has written it down."""
        if self.unrecorded_job:
            return "slurm"
        found = self.submission.get("mode") or self.state.get("mode") or ("slurm" if self.start.get("job_id") else "")
        return str(found or (self._before.mode if self._before else ""))

    @property
    def job_id(self) -> str:
        """Of the attempt; it is the job before's where Slurm requeued that one."""
        found = self.submission.get("job_id") or self.state.get("job_id") or self.start.get("job_id")
        return str(found or self.unrecorded_job or (self._before.job_id if self._before else ""))

    @cached_property
    def _before(self) -> Folder | None:
        """The attempt before, for one that has not written anything yet; one that a launcher is about to submit has a job of
        its own to come."""
        earlier = [attempt for attempt in self.attempts if attempt < self.run.attempt]
        return self.seen_at(earlier[-1]) if earlier and not self.start.get("launcher") else None

    def look_for_damage(self, *, is_whole: bool) -> list[str]:
        """Names of what is missing; `is_whole` when everything must have been written (the launcher is through)."""
        if not self.identity and "run.json" not in names_if_any(self.root):
            self._note("run.json (missing)")
        for name in FOLDERS:
            if not (self.root / name).is_dir():
                self._note(f"{name}/ (missing)")
        for attempt in self.attempts or [0]:  # not every number: an attempt may end before its supervisor starts
            for name in ("logs", "submitit"):
                if not (self.root / "attempts" / str(attempt) / name).is_dir():
                    self._note(f"attempts/{attempt}/{name}/ (missing)")
        present = set(names_if_any(self.run.attempt_dir))
        if "events.jsonl" in present and "state.json" not in present:
            self._note(f"attempts/{self.run.attempt}/state.json (missing)")
        if is_whole:
            self._look_for_records()
        return self.damage

    def _look_for_records(self) -> None:
        names = set(names_if_any(self.root))
        for name in ("config.yaml", "plan.json", "desired.json"):
            if name not in names:
                self._note(f"{name} (missing)")
        for name in {"plan.json", "desired.json"} & names:
            self.record(self.root / name, any_attempt=True)
        if "metrics.jsonl" in names and self.state.get("phase") == "succeeded" and "summary.json" not in names:
            self._note("summary.json (missing)")
        summary = self.record(self.run.summary_json, any_attempt=True) or {}
        latest = self.record(self.run.latest_json, any_attempt=True)
        if "metrics.jsonl" in names and latest is None and not self._is_noted("weights/"):
            self._note("weights/LATEST.json (missing)")
        if latest is not None and not isinstance(latest.get("version"), int):
            self._note("weights/LATEST.json (damaged)")
            latest = None
        named = [self.run.weights_version(latest["version"])] if latest else []
        named += [self.run.weights / Path(summary["checkpoint"]).name] if summary.get("checkpoint") else []
        for version in dict.fromkeys(named):
            if "manifest.json" not in names_if_any(version) and not self._is_noted("weights/"):
                self._note(f"{version.relative_to(self.root)} (missing)")

    def _is_noted(self, name: str) -> bool:
        return any(entry.startswith(f"{name} ") for entry in self.damage)

    def _note(self, entry: str) -> None:
        if entry not in self.damage:
            self.damage.append(entry)


def _read(path: Path, root: Path, damage: list[str]) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except (DamagedRecordError, OSError) as error:
        how = "damaged" if isinstance(error, DamagedRecordError) else f"unreadable: {error.strerror}"
        entry = f"{path.relative_to(root)} ({how})"
        if entry not in damage:
            damage.append(entry)
        return None


def is_run(root: Path) -> bool:
    """Is this a run directory, or at least what is left of one?"""
    names = set(names_if_any(root))
    if "run.json" in names:
        return True
    return (
        any(name.isdigit() for name in names_if_any(root / "attempts")) or len(names.intersection(_TRACES)) >= _ENOUGH
    )


def find_runs(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Run directories below `root` (also `root` itself), sorted by path; nothing is looked for inside a run or behind links."""
    if is_run(root):
        yield root
    elif depth > 0:
        for name in names_if_any(root):
            if (root / name).is_dir() and not (root / name).is_symlink():
                yield from find_runs(root / name, depth - 1)


def _what_is(root: Path) -> str:
    if not root.exists():
        return "there is no such folder"
    if not root.is_dir():
        return "it is a file"
    if not os.access(root, os.R_OK | os.X_OK):
        return "you may not read it (a run belongs to who started it)"
    below = [from_here(path) for path in list(find_runs(root, 3))[:3]]
    return (
        f"runs below it are {', '.join(below)}" if below else "it has no run.json; `python -m launch.list` shows runs"
    )
