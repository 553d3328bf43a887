"""The run directory: the only module that knows its layout.

Every record carries (run_id, attempt, sequence, writer). A reader ignores records of another run; control records of an
older attempt are ignored too, and a writer of an older attempt is refused, so a requeued job cannot act on leftovers.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.files import DamagedRecordError, list_names, make_directory, read_json, read_json_inode, write_json_atomic
from stages.privacy import make_private, writable_by_others
from stages.publication import Publication

SCHEMA_VERSION = 1
STAMPS = frozenset({"run_id", "attempt", "sequence", "writer"})
"""Keys that RunDir.write adds to every record."""
_VERSION_NAME = re.compile(r"^v(\d{6,})$")
_STEP_NAME = re.compile(r"^step_(\d{6,})$")
_LEDGER_NAME = re.compile(r"^attempt_(\d{3,})(?:\.([1-9]\d*))?\.jsonl$")


class RunDirectoryError(ValueError):
    """The run directory is not what the caller needs it to be."""


class RunNotFoundError(RunDirectoryError):
    """There is no run in this directory."""


class RunInUseError(RunDirectoryError):
    """The directory already holds a run (or other files)."""


class NotPrivateError(RunDirectoryError):
    """Other users could read the run directory, or put something into it that the run would execute."""


class FencedError(RuntimeError):
    """A newer attempt of this run exists: this process must not write any more."""


class OutsideRunError(RunDirectoryError):
    """A path read from a record points outside the run directory."""


@dataclass(frozen=True)
class RunDir:
    """One process's view of a run.

    `attempt` is the attempt that this process belongs to; `writer` names it in every record (for example "trainer").
    `flush_exchange`: are records of the weight exchange flushed (`stages.weights.filesystems.must_flush`)? All others always are.
    """

    root: Path
    run_id: str
    attempt: int
    writer: str
    flush_exchange: bool = True
    _sequence: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False, compare=False)

    # ---- making and opening ------------------------------------------------------------------------------------

    @classmethod
    def create(cls, root: Path, *, extra: dict[str, Any] | None = None) -> RunDir:
        """Make a new run in `root`, with attempt 0 and a random run id.

        Raises RunInUseError when `root` exists and is not empty, or when another process makes a run there right now,
        NotPrivateError where it cannot be kept from other users.
        """
        root = root.absolute()
        in_use = f"{root} is not empty; choose another launch.run_dir or remove the directory"
        if list_names(root):
            raise RunInUseError(in_use)
        make_directory(root)
        if problem := make_private(root):
            raise NotPrivateError(f"{problem}; choose another launch.run_dir")
        try:
            (root / "attempts").mkdir(mode=0o700)  # of two launchers, one makes this
        except FileExistsError:
            raise RunInUseError(in_use) from None
        run = cls(root=root, run_id=secrets.token_hex(8), attempt=0, writer="launcher")
        for folder in (
            run.instances,
            run.weights,
            run.requests,
            run.refreshed,
            run.batches,
            run.ledger,
            run.checkpoints,
        ):
            make_directory(folder)
        run.start_attempt(0)
        run.write(run.run_json, {"schema_version": SCHEMA_VERSION, "created": time.time(), **(extra or {})})
        return run

    @classmethod
    def open(cls, root: Path, *, writer: str, attempt: int | None = None) -> RunDir:
        """Open the run in `root`. Without `attempt`, the newest attempt.

        Raises RunNotFoundError, NotPrivateError when others may write into it, RunDirectoryError for another layout.
        """
        root = root.absolute()
        if problem := writable_by_others(root):
            raise NotPrivateError(problem)
        record = read_json(root / "run.json")
        if record is None:
            raise RunNotFoundError(f"{root} holds no run (no run.json); a run is made by `python -m launch`")
        if record.get("schema_version") != SCHEMA_VERSION:
            found = record.get("schema_version")
            raise RunDirectoryError(f"{root} has layout {found}; this version of Libra reads layout {SCHEMA_VERSION}")
        newest = max((int(name) for name in list_names(root / "attempts") if name.isdigit()), default=0)
        return cls(root, record["run_id"], newest if attempt is None else attempt, writer)

    def start_attempt(self, attempt: int) -> None:
        """Make the folders of an attempt; from now on writers of older attempts are fenced out."""
        base = make_directory(self.root / "attempts" / str(attempt))
        for name in ("logs", "submitit", "traces", "reads"):
            make_directory(base / name)

    def newest_attempt(self) -> int:
        return max((int(name) for name in list_names(self.root / "attempts") if name.isdigit()), default=0)

    # ---- layout ------------------------------------------------------------------------------------------------

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def config_yaml(self) -> Path:
        return self.root / "config.yaml"

    @property
    def plan_json(self) -> Path:
        return self.root / "plan.json"

    @property
    def job_sbatch(self) -> Path:
        return self.root / "job.sbatch"

    @property
    def desired_json(self) -> Path:
        return self.root / "desired.json"

    @property
    def excluded_nodes_json(self) -> Path:
        """Written by the supervisor: nodes that the next job of this run shall not get, with the reason."""
        return self.root / "excluded_nodes.json"

    @property
    def metrics_jsonl(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def summary_json(self) -> Path:
        return self.root / "summary.json"

    @property
    def token_file(self) -> Path:
        """The run's bearer token for the rollout servers: mode 0600, one line."""
        return self.root / "token"

    @property
    def attempt_dir(self) -> Path:
        return self.root / "attempts" / str(self.attempt)

    @property
    def state_json(self) -> Path:
        """Written by the supervisor only: phase, running steps, first fatal cause."""
        return self.attempt_dir / "state.json"

    @property
    def submission_json(self) -> Path:
        """Written by the launcher: {"mode": "slurm" | "local", "job_id": str}."""
        return self.attempt_dir / "submission.json"

    @property
    def attempt_json(self) -> Path:
        """Written once by whoever starts the attempt: job id, reason, the step it resumes from."""
        return self.attempt_dir / "attempt.json"

    @property
    def stop_json(self) -> Path:
        """Written by the supervisor only: the request to end with a checkpoint (`stages.stopping`)."""
        return self.attempt_dir / "stop.json"

    @property
    def cancel_json(self) -> Path:
        """Written by `python -m launch.cancel`, looked at by the supervisor: how people ask for the end of the attempt."""
        return self.attempt_dir / "cancel.json"

    @property
    def given_up_json(self) -> Path:
        """Written by the supervisor: instances that this attempt goes on without (`stages.members`)."""
        return self.attempt_dir / "given_up.json"

    @property
    def start_json(self) -> Path:
        """Written by the trainer when it is ready to train: the step that this attempt starts from, and from what."""
        return self.attempt_dir / "start.json"

    @property
    def events_jsonl(self) -> Path:
        """Written by the supervisor only: one line for each start, exit, decision."""
        return self.attempt_dir / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.attempt_dir / "logs"

    @property
    def submitit(self) -> Path:
        return self.attempt_dir / "submitit"

    @property
    def traces(self) -> Path:
        return self.attempt_dir / "traces"

    def reads_json(self, name: str, rank: int) -> Path:
        """Written by one task of a stage at its end: {"options": the names of the options that it read}."""
        return self.attempt_dir / "reads" / f"{name}.{rank}.json"

    @property
    def instances(self) -> Path:
        return self.root / "instances"

    def instance_json(self, name: str) -> Path:
        return self.instances / f"{name}.json"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    def weights_version(self, version: int) -> Path:
        return self.weights / f"v{version:06d}"

    @property
    def latest_json(self) -> Path:
        return self.weights / "LATEST.json"

    @property
    def requests(self) -> Path:
        return self.root / "control" / "requests"

    def request_json(self, version: int) -> Path:
        return self.requests / f"v{version:06d}.json"

    def acks(self, version: int) -> Path:
        return self.root / "control" / "acks" / f"v{version:06d}"

    def ack_json(self, version: int, instance: str, phase: str) -> Path:
        """`phase` is "prepared", "loaded" or "nack"."""
        return self.acks(version) / f"{instance}.{phase}.json"

    @property
    def refreshed(self) -> Path:
        return self.root / "control" / "refreshed"

    def refreshed_json(self, version: int) -> Path:
        """Written by the trainer when every instance of the request has proved `version`."""
        return self.refreshed / f"v{version:06d}.json"

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    def batch(self, step: int) -> Path:
        return self.batches / f"step_{step:06d}"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    def ledger_jsonl(self, attempt: int, restart: int = 0) -> Path:
        """Written by the controller of `attempt`; `restart` counts its restarts within it."""
        return self.ledger / f"attempt_{attempt:03d}{f'.{restart}' if restart else ''}.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The trainer's state after `step` optimizer steps."""
        return self.checkpoints / f"step_{step:06d}"

    # ---- records -----------------------------------------------------------------------------------------------

    def write(self, path: Path, payload: dict[str, Any], *, flush: bool = True) -> None:
        """Publish a record atomically. Raises FencedError when a newer attempt exists, OutsideRunError on a stray path.

        Whoever reads a record that is written without `flush` must do so with `skip_damaged`.
        """
        write_json_atomic(path, self.stamped(path, payload), flush=flush)

    def stamped(self, path: Path, payload: dict[str, Any]) -> dict[str, Any]:
        """`payload` as this process may write it to `path` now; raises what `write` raises."""
        self.check_fence()
        self.inside(path)
        stamp = {
            "run_id": self.run_id,
            "attempt": self.attempt,
            "sequence": next(self._sequence),
            "writer": self.writer,
        }
        return {**payload, **stamp}

    def read(self, path: Path, *, any_attempt: bool = False, skip_damaged: bool = False) -> dict[str, Any] | None:
        """A record of this run, or None. Records of an older attempt count only with `any_attempt` (published data).

        With `skip_damaged` what is no JSON object does not count either, as if it were not there: a crash of the host leaves that of
        a record that was not flushed, and ends the attempt that wrote it. Raises DamagedRecordError otherwise.
        """
        return self.read_inode(path, any_attempt=any_attempt, skip_damaged=skip_damaged)[1]

    def read_inode(
        self, path: Path, *, any_attempt: bool = False, skip_damaged: bool = False
    ) -> tuple[int, dict[str, Any] | None]:
        """As `read`, with the inode number of the file that was read, whether its record counts or not; 0 when it is damaged."""
        try:
            inode, record = read_json_inode(path)
        except DamagedRecordError:
            if not skip_damaged:
                raise
            return 0, None
        if record is None or record.get("run_id") != self.run_id:
            return inode, None
        if not any_attempt and record.get("attempt") != self.attempt:
            return inode, None
        return inode, record

    def check_fence(self) -> None:
        """Raises FencedError when a newer attempt exists."""
        self.check_older(self.newest_attempt())

    def check_older(self, attempt: int) -> None:
        """Raises FencedError when `attempt`, of which a trace was found, is newer than this process's."""
        if attempt > self.attempt:
            raise FencedError(f"attempt {self.attempt} ({self.writer}) is over: attempt {attempt} of {self.root} runs")

    def inside(self, path: Path | str) -> Path:
        """`path` (absolute, or relative to the run) as a real path inside the run; follows symbolic links.

        Raises OutsideRunError for anything that would leave the run directory.
        """
        candidate = Path(os.path.realpath(self.root / path))
        if not candidate.is_relative_to(os.path.realpath(self.root)):
            raise OutsideRunError(f"{path} lies outside the run directory {self.root}")
        return candidate

    @contextmanager
    def publishing(self, final: Path, manifest_name: str = "manifest.json") -> Iterator[Publication]:
        """Fill a directory that other processes see only when complete.

        Yields a Publication with a temporary `path`; call `commit(payload)` on it to write the manifest and rename. A
        body that leaves without commit (or raises) leaves nothing behind.
        """
        temporary = final.with_name(f".{final.name}.tmp-{self.attempt}-{secrets.token_hex(4)}")
        make_directory(temporary)
        publication = Publication(self, temporary, final, manifest_name)
        try:
            yield publication
        finally:
            if not publication.committed:
                shutil.rmtree(temporary, ignore_errors=True)

    # ---- what exists -------------------------------------------------------------------------------------------

    def published_versions(self) -> list[int]:
        return [int(m[1]) for name in list_names(self.weights) if (m := _VERSION_NAME.match(name))]

    def published_batches(self) -> list[int]:
        return [int(m[1]) for name in list_names(self.batches) if (m := _STEP_NAME.match(name))]

    def published_checkpoints(self) -> list[int]:
        return [int(m[1]) for name in list_names(self.checkpoints) if (m := _STEP_NAME.match(name))]

    def ledger_files(self) -> list[tuple[int, int]]:
        """(attempt, restart) of every ledger file, in the order in which they were written."""
        found = (_LEDGER_NAME.match(name) for name in list_names(self.ledger))
        return sorted((int(m[1]), int(m[2] or 0)) for m in found if m)

    def manifest(self, directory: Path, *, skip_damaged: bool = False) -> dict[str, Any] | None:
        """The commit record of a published directory of this run, from any attempt; None when it does not exist."""
        return self.read(directory / "manifest.json", any_attempt=True, skip_damaged=skip_damaged)
