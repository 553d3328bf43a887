"""A Slurm that exists only in memory, behind `launch.slurm.command`: jobs as a test wants them, and what was asked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launch import truth
from launch.runs import Folder
from launch.slurm import SlurmCommandError
from stages.rundir import RunDir
from tests.made_runs import made

SQUEUE_UNKNOWN = "squeue failed (1): slurm_load_jobs error: Invalid job id specified"
SACCT_OFF = "sacct failed (1): Slurm accounting storage is disabled"


@dataclass
class Job:
    state: str
    reason: str = "None"
    nodes: str = ""
    start: str = "N/A"
    left: str = "1:00:00"
    priority: int = 100
    partition: str = "gpu"
    exit_code: str = "0:0"
    is_shown: bool = True
    script: str = ""


@dataclass
class FakeSlurm:
    """`jobs` as squeue and scontrol show them; `others` are lines of the queue that `squeue -t PENDING` adds."""

    jobs: dict[int, Job] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    accounting: dict[int, str] = field(default_factory=dict)
    is_down: bool = False
    calls: list[list[str]] = field(default_factory=list)

    def command(self, arguments: Sequence[str], timeout_s: float = 10.0) -> str:
        self.calls.append(list(arguments))
        if self.is_down:
            raise SlurmCommandError(f"{arguments[0]} did not answer within {timeout_s:g} s")
        return {"squeue": self._squeue, "scontrol": self._scontrol, "sacct": self._sacct, "scancel": self._scancel}[
            arguments[0]
        ](list(arguments))

    def asked(self, program: str) -> int:
        return sum(call[0] == program for call in self.calls)

    def _squeue(self, words: list[str]) -> str:
        form = words[words.index("-o") + 1]
        if "-j" not in words:
            return "\n".join([*self.others, *(self._line(job, form) for job in self.jobs)])
        wanted = [int(job) for job in words[words.index("-j") + 1].split(",")]
        known = [job for job in wanted if job in self.jobs and self.jobs[job].is_shown]
        if not known and len(wanted) == 1:
            raise SlurmCommandError(SQUEUE_UNKNOWN)
        return "\n".join(self._line(job, form) for job in known)

    def _line(self, number: int, form: str) -> str:
        job = self.jobs[number]
        values = {
            "%i": str(number),
            "%T": job.state,
            "%r": job.reason,
            "%N": job.nodes,
            "%S": job.start,
            "%L": job.left,
            "%Q": str(job.priority),
            "%P": job.partition,
            "%o": job.script,
        }
        return "|".join(values[key] for key in form.split("|"))

    def _scontrol(self, words: list[str]) -> str:
        number = int(words[-1])
        if number not in self.jobs:
            raise SlurmCommandError("scontrol failed (1): slurm_load_jobs error: Invalid job id specified")
        job = self.jobs[number]
        return f"JobId={number} JobState={job.state} Reason={job.reason} ExitCode={job.exit_code} NodeList={job.nodes or '(null)'}"

    def _sacct(self, words: list[str]) -> str:
        number = int(words[words.index("-j") + 1])
        if number not in self.accounting:
            raise SlurmCommandError(SACCT_OFF)
        return self.accounting[number]

    def _scancel(self, words: list[str]) -> str:
        self.jobs[int(words[-1])].state = "CANCELLED"
        return ""


@pytest.fixture
def slurm_in_memory(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Import it into a test module to use it."""
    fake = FakeSlurm()
    monkeypatch.setattr("launch.slurm.command", fake.command)
    return fake


@pytest.fixture
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of made runs do not move: nobody waits long for them."""
    monkeypatch.setattr(truth, "LOOK_S", 0.05)
    monkeypatch.setattr(truth, "LOOK_PAUSE_S", 0.01)


def beating(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the supervisor's and the instances' counters move between any two looks."""
    counter = itertools.count(100)
    real = Folder.record

    def record(self: Folder, path: Path, *, any_attempt: bool = False) -> dict[str, object] | None:
        found = real(self, path, any_attempt=any_attempt)
        if found is not None and "heartbeat" in found and found.get("phase") not in ("succeeded", "failed"):
            return found | {"heartbeat": next(counter)}
        return found

    monkeypatch.setattr(Folder, "record", record)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm_in_memory: FakeSlurm) -> RunDir:
    """A run whose job and supervisor live."""
    run = made(tmp_path / "run", "running")
    slurm_in_memory.jobs[41] = Job("RUNNING", nodes="node0")
    beating(run, monkeypatch)
    return run
