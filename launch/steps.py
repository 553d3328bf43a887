"""One interface to a running step, whether srun or plain subprocesses run it.

A step is `spec.tasks` processes that each load the pickled stage callable from the step's own folder. What a step did is
decided from two facts: the exit status of its tasks, and a result pickle of every task in that folder. An exit status
alone is not enough: srun returns 0 after a node failure, and for a task that left on TERM (facts: srun rc 0 is not success).
"""

from __future__ import annotations

import os
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths, pickle_load

from launch.scrub import scrubbed
from stages.desired import StepSpec
from stages.files import list_names, make_directory
from stages.process import INCARNATION_VARIABLE
from stages.rundir import RunDir

STEP_ID_VARIABLE = "LIBRA_STEP_ID"
"""Carried by every process of a step and by all its descendants; how a leftover is recognised."""

Entry = Callable[[str, str, int, str], dict[str, Any]]
"""The stage callable: (role, run_dir, attempt, step name) -> result. Must be importable where the step runs."""


class StepStartError(RuntimeError):
    """A step could not be started."""


@dataclass(frozen=True)
class Incarnation:
    """One start of a step: its names and files. A restarted step is a new incarnation with a folder of its own."""

    spec: StepSpec
    run: RunDir
    job_id: str
    number: int = 0

    @property
    def label(self) -> str:
        return self.spec.name if self.number == 0 else f"{self.spec.name}.{self.number}"

    @property
    def unique_name(self) -> str:
        """The step's name in Slurm: `<name>.<attempt>`."""
        return f"{self.label}.{self.run.attempt}"

    @property
    def step_id(self) -> str:
        """The closing slash keeps rollout_1 from being a prefix of rollout_10."""
        return f"{self.run.run_id}.{self.run.attempt}.{self.label}/"

    @property
    def folder(self) -> Path:
        return self.run.submitit / self.label

    @property
    def starter_log(self) -> Path:
        """stderr of srun."""
        return self.run.logs / f"{self.label}.srun.log"

    @property
    def log_stem(self) -> Path:
        """What the names of the tasks' logs begin with."""
        return self.run.logs / self.label

    def log(self, rank: int | str) -> Path:
        """stdout and stderr of one task; "*" as rank for a pattern of all."""
        return self.log_stem.with_name(f"{self.label}.{rank}.log")

    def write_pickle(self, entry: Entry, timeout_min: int) -> None:
        """Leave the callable where `stages.start FOLDER`, which is submitit, looks for it."""
        spec = self.spec
        submission = DelayedSubmission(entry, spec.role, str(self.run.root), self.run.attempt, spec.name)
        submission.set_timeout(timeout_min, 0)
        make_directory(self.folder)
        submission.dump(JobPaths(self.folder, self.job_id).submitted_pickle)

    def results(self) -> dict[int, tuple[str, Any]]:
        """rank -> ("success", value) or ("error", traceback text), for the tasks that have written one."""
        paths = {rank: JobPaths(self.folder, self.job_id, rank).result_pickle for rank in range(self.spec.tasks)}
        present = set(list_names(self.folder))
        return {rank: pickle_load(path) for rank, path in paths.items() if path.name in present}


@dataclass
class StepStatus:
    """`exits` maps the rank of each task known to have ended to its exit status (-n: killed by signal n).

    `ended`: nothing of the step runs any more. `note` is what the starter (srun) said about the end, `lost_nodes` are those
    that it says have failed.
    """

    ended: bool
    exits: dict[int, int] = field(default_factory=dict)
    note: str = ""
    lost_nodes: tuple[str, ...] = ()


class Step(ABC):
    """A started step."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation

    @property
    def spec(self) -> StepSpec:
        return self.incarnation.spec

    @property
    @abstractmethod
    def pid(self) -> int:
        """Of the first process that the supervisor started for it, on the supervisor's host."""

    @abstractmethod
    def status(self) -> StepStatus:
        """Never blocks."""


class StepRunner(ABC):
    """Starts and stops steps. All methods are for the main thread: children die with the thread that started them."""

    result_wait_s = 0.0
    """How long a result may take to become visible after its task has ended (attribute caches of NFS)."""

    @abstractmethod
    def start(self, incarnation: Incarnation) -> Step:
        """Raises StepStartError. The incarnation's pickle is already written."""

    @abstractmethod
    def ask_to_stop(self, steps: Sequence[Step]) -> None:
        """TERM to every task."""

    @abstractmethod
    def kill(self, steps: Sequence[Step]) -> None:
        """KILL to whatever is left of the steps."""

    @abstractmethod
    def release(self, step: Step) -> None:
        """The step has ended and its leftovers are gone: what it held may be given to another."""

    def explain(self, step: Step) -> str:
        """What the outside says about a step's end, for the message; empty when nothing."""
        return ""

    def hosts(self, step: Step) -> tuple[str, ...]:
        """Where the step runs, or ran."""
        return (socket.gethostname(),)

    def find_lost(self, step: Step) -> tuple[str, ...]:
        """Those of the step's hosts that this job has lost. Asks Slurm, so only after a failure."""
        return ()

    def is_place_gone(self, step: Step) -> bool:
        """Has the part of the job ended in which the step ran? Asks Slurm, so only after a failure."""
        return False

    def usable_nodes(self, component: int) -> dict[int, str]:
        """Number -> host of the nodes of a component that this job still has."""
        return {}


def step_environment(incarnation: Incarnation, base: Mapping[str, str]) -> dict[str, str]:
    """What every task inherits: no trace of the outer job, and the mark by which leftovers are found."""
    environment = scrubbed(base)
    environment.setdefault("OMP_NUM_THREADS", str(incarnation.spec.cpus_per_task))
    environment.update(
        {
            STEP_ID_VARIABLE: incarnation.step_id,
            INCARNATION_VARIABLE: str(incarnation.number),
            "PYTHONUNBUFFERED": "1",
            # setproctitle (vLLM uses it) writes over the environment that /proc shows, and with it our mark.
            "SPT_NOENV": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
    )
    return environment


def step_command(python: str, incarnation: Incarnation, prefix: Sequence[str] = ()) -> list[str]:
    return [*prefix, python, "-u", "-m", "stages.start", str(incarnation.folder)]


UNREADABLE = "cannot read "
"""What the only line of a log begins with that is there and cannot be read."""


def tail(path: Path, lines: int = 30, limit_bytes: int = 65536) -> list[str]:
    """The last lines of a log; empty when there is none. One that cannot be read gives a line that says so."""
    try:
        with path.open("rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - limit_bytes))
            text = handle.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{UNREADABLE}{path}: {error.strerror}"]
    return text.splitlines()[-lines:]


_PLUMBING = re.compile(r'^\s+File "(<frozen runpy>|.*/submitit/core/)|^submitit (INFO|ERROR) ')


def without_plumbing(lines: Iterable[str]) -> list[str]:
    """The lines of a log without submitit's own and Python's start-up frames, which say nothing about the stage."""
    kept: list[str] = []
    skipping = False
    for line in lines:
        if _PLUMBING.match(line):
            skipping = True
        elif not (skipping and line.startswith("    ")):
            skipping = False
            kept.append(line)
    return kept


_FRAME = re.compile(r'^\s+File "')


def exception_text(lines: Iterable[str], most_lines: int = 30) -> str:
    """The exception's own words from the last traceback in `lines`: "ValueError: ..." with its continuation lines.

    Empty when there is no traceback.
    """
    found = list(lines)
    frames = [index for index, line in enumerate(found) if _FRAME.match(line)]
    if not frames:
        return ""
    after = frames[-1] + 1
    while after < len(found) and (not found[after].strip() or found[after][0].isspace()):
        after += 1
    return "\n".join(found[after : after + most_lines]).strip()
