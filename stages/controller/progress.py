"""What the trainer has done so far, as its records in the run directory show it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stages.files import list_names
from stages.rundir import RunDir


class TrainerRecordError(RuntimeError):
    """A record of the trainer contradicts its place."""


class TrainerSilentError(TimeoutError):
    """The trainer owes a record and did not write it in time."""


@dataclass
class Progress:
    """`served_version` is the newest that every instance proved, -1 before the first, which is `first_version`.

    `trained_steps` counts receipts on top of what it starts with. Records of older attempts do not count.
    """

    run: RunDir
    total_steps: int
    sync_interval: int
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    served_version: int = -1
    trained_steps: int = 0
    first_version: int = 0
    receipts: dict[int, dict[str, Any]] = field(default_factory=dict)
    refreshed: dict[int, dict[str, Any]] = field(default_factory=dict)
    _moved_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._moved_s = self.clock()

    @property
    def is_complete(self) -> bool:
        return self.trained_steps == self.total_steps == self.served_version

    @property
    def next_version(self) -> int:
        """The version that is published after `served_version`."""
        if self.served_version < 0:
            return self.first_version
        following = (self.served_version // self.sync_interval + 1) * self.sync_interval
        return min(following, self.total_steps)

    def newest_published(self, version: int) -> int:
        """The newest version up to `version` that the trainer publishes in this attempt."""
        if version == self.total_steps:
            return version
        return max(self.first_version, version - version % self.sync_interval)

    def look(self, batches_written: int) -> list[int]:
        """Read new receipts and refreshed records; returns the steps whose receipts are new.

        Raises TrainerRecordError, TrainerSilentError.
        """
        new: list[int] = []
        moved = False
        while self.trained_steps < batches_written and self._look_for_receipt(self.trained_steps):
            new.append(self.trained_steps)
            self.trained_steps += 1
        while self.served_version < self.total_steps and self._look_for_version(self.next_version):
            self.served_version = self.next_version
            moved = True
        if new or moved or not self._owed(batches_written):
            self._moved_s = self.clock()
        else:
            self._check_silence(batches_written)
        return new

    def _look_for_receipt(self, step: int) -> bool:
        folder = self.run.batch(step)
        record = self.run.read(folder / "trained.json") if "trained.json" in list_names(folder) else None
        if record is None:
            return False
        if (record["step"], record["version"]) != (step, step + 1):
            raise TrainerRecordError(
                f"{folder}/trained.json is about step {record['step']} and version {record['version']}, "
                f"wanted {step} and {step + 1}"
            )
        self.receipts[step] = record
        return True

    def _look_for_version(self, version: int) -> bool:
        path = self.run.refreshed_json(version)
        record = self.run.read(path, skip_damaged=True) if path.name in list_names(path.parent) else None
        if record is None:
            return False
        if record["version"] != version:
            raise TrainerRecordError(f"{path} is about version {record['version']}, wanted {version}")
        self.refreshed[version] = record
        return True

    def _owed(self, batches_written: int) -> str:
        """The record that the trainer must write next; empty when it waits for us, or for the first start of the servers."""
        if self.served_version < 0:
            return ""
        if self.next_version <= self.trained_steps and not self.is_complete:
            return str(self.run.refreshed_json(self.next_version))
        if self.trained_steps < batches_written:
            return str(self.run.batch(self.trained_steps) / "trained.json")
        return ""

    def _check_silence(self, batches_written: int) -> None:
        silent_s = self.clock() - self._moved_s
        if silent_s > self.timeout_s:
            raise TrainerSilentError(
                f"waited {silent_s:.0f} s (algorithm.step_timeout_s) for {self._owed(batches_written)} from the trainer; "
                f"steps trained {self.trained_steps}, version served {self.served_version}"
            )
