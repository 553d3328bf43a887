"""Starts the doctor's programs: as steps with the very flags that a run's stages get, or as plain processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.doctor.order import Order
from launch.srun import Allocation, into_own_log, srun_words
from launch.steps import Incarnation, step_environment, tail
from stages.desired import StepSpec
from stages.files import make_directory
from stages.process import die_with_parent
from stages.rundir import RunDir

MODULES = "launch.doctor.inside"
NO_INTERPRETER = 127
SHELL = (
    "/bin/sh",
    "-c",
    f'[ -x "$0" ] || {{ echo "$0 cannot be started here" >&2; exit {NO_INTERPRETER}; }}; exec "$0" "$@"',
)
"""srun would only say "execve(): No such file or directory"; this says what is missing."""
LAST_WORDS = 6


@dataclass(frozen=True)
class Size:
    """What a step asks for, on each of `nodes` nodes from number `node` on. It runs as a stage of `role` does."""

    nodes: int = 1
    tasks_per_node: int = 1
    cpus: int = 1
    gpus: int = 0
    node: int = 0
    role: str = "trainer"


@dataclass
class Running:
    """A started program. `logs` are its tasks' outputs, `errors` what srun said."""

    name: str
    process: subprocess.Popen[bytes]
    logs: Path
    errors: Path
    started_s: float

    def wait(self, deadline_s: float) -> str:
        """Wait for the end, and kill after `deadline_s` from the start. What went wrong in its own words; "" when nothing did."""
        try:
            code = self.process.wait(max(0.0, self.started_s + deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            return f"not over after {deadline_s:g} s; {self._words()}"
        return "" if code == 0 else f"exit code {code}; {self._words()}"

    def kill(self) -> None:
        """SIGKILL of srun ends its step as well (tried on 22.05: within 0.2 s); plain programs lead a group of their own."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _words(self) -> str:
        lines = [
            line
            for file in (self.errors, *sorted(self.logs.parent.glob(self.logs.name)))
            for line in tail(file, LAST_WORDS)
        ]
        return " | ".join(line.strip() for line in lines if line.strip())[:600] or "it said nothing"


class Steps(ABC):
    """All programs that were started can be killed together, whatever happens."""

    def __init__(self, order: Order) -> None:
        self._order = order
        # Only for the names of log files: srun's flags are made from an incarnation of a step.
        self._run = RunDir(order.path / "run", order.token, 0, "doctor")
        make_directory(self._run.logs)
        self._started: list[Running] = []

    def start(
        self, name: str, program: str, arguments: Sequence[str], size: Size, flags: Sequence[str] = ()
    ) -> Running:
        """`program` is a module of `inside`. `flags` take the place of --gpus-per-node. Main thread only. Raises OSError."""
        spec = StepSpec(
            name=name,
            role=size.role,
            component=0,
            node=size.node,
            nodes=size.nodes,
            tasks=size.nodes * size.tasks_per_node,
            tasks_per_node=size.tasks_per_node,
            cpus_per_task=size.cpus,
            gpus_per_node=size.gpus,
        )
        incarnation = Incarnation(spec, self._run, self._job_id())
        command = [self._order.python, "-u", "-m", f"{MODULES}.{program}", self._order.folder, *arguments]
        parent = os.getpid()
        with incarnation.starter_log.open("ab") as errors:
            process = subprocess.Popen(
                self._command(incarnation, command, flags),
                env=self._environment(incarnation),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )
        self._started.append(Running(name, process, incarnation.log("*"), incarnation.starter_log, time.monotonic()))
        return self._started[-1]

    def kill_all(self) -> None:
        for running in self._started:
            running.kill()

    def _environment(self, incarnation: Incarnation) -> dict[str, str]:
        return step_environment(incarnation, os.environ)

    @abstractmethod
    def _job_id(self) -> str: ...

    @abstractmethod
    def _command(self, incarnation: Incarnation, command: list[str], flags: Sequence[str]) -> list[str]: ...


class SlurmSteps(Steps):
    """Inside the doctor's job, in its batch shell."""

    def __init__(self, order: Order, allocation: Allocation) -> None:
        super().__init__(order)
        self._allocation = allocation

    def _job_id(self) -> str:
        return str(self._allocation.job_id)

    def _command(self, incarnation: Incarnation, command: list[str], flags: Sequence[str]) -> list[str]:
        around = self._order.around
        ours = srun_words(incarnation, self._allocation, around)
        if flags:
            ours = [word for word in ours if not word.startswith("--gpus-per-node")] + list(flags)
        return [*ours, *into_own_log(incarnation, [*around.prefix(incarnation.spec.role), *SHELL, *command])]


class LocalSteps(Steps):
    """Without Slurm: the program itself, once. GPUs stay visible as they are."""

    def _job_id(self) -> str:
        return "0"

    def _command(self, incarnation: Incarnation, command: list[str], flags: Sequence[str]) -> list[str]:
        return [*self._order.around.prefix(incarnation.spec.role), *command]

    def _environment(self, incarnation: Incarnation) -> dict[str, str]:
        environment = super()._environment(incarnation)
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            environment["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        return environment
