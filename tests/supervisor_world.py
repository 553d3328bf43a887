"""A world for the supervisor's state machine: steps that exist only in memory, and a clock that the test owns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launch.desired_steps import desired_steps
from launch.interruption import Interruption
from launch.journal import Journal
from launch.steps import Incarnation, Step, StepRunner, StepStartError, StepStatus
from launch.supervisor import Supervisor
from launch.verdict import Cause, Success
from stages.desired import DesiredState, end_run, write_desired
from stages.rundir import RunDir
from tests.fake_runs import fake_config, fake_plan
from tests.fake_stages import entry

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Records are synced to disk; a file system in memory makes that free."""

CANCEL = Cause("supervisor", "cancelled", "the run was cancelled (SIGTERM)", 143)


class MemoryStep(Step):
    """`verdict` and `ended` are what the test makes of it."""

    pid = 1

    def __init__(self, incarnation: Incarnation, obeys: bool) -> None:
        super().__init__(incarnation)
        self.obeys = obeys
        self.ended = False
        self.verdict: Success | Cause | None = None

    def status(self) -> StepStatus:
        return StepStatus(self.ended)

    def end(self, verdict: Success | Cause) -> None:
        if not self.ended:
            self.ended, self.verdict = True, verdict


class MemoryRunner(StepRunner):
    """`stubborn` steps ignore TERM; `broken` ones cannot be started."""

    def __init__(self, stubborn: Sequence[str] = (), broken: Sequence[str] = ()) -> None:
        self.stubborn = stubborn
        self.broken = broken
        self.started: list[MemoryStep] = []
        self.asked: list[str] = []
        self.killed: list[str] = []

    def start(self, incarnation: Incarnation) -> Step:
        if incarnation.spec.name in self.broken:
            raise StepStartError("no room")
        self.started.append(MemoryStep(incarnation, incarnation.spec.name not in self.stubborn))
        return self.started[-1]

    def ask_to_stop(self, steps: Sequence[Step]) -> None:
        for step in steps:
            assert isinstance(step, MemoryStep)
            self.asked.append(step.spec.name)
            if step.obeys:
                step.end(Success({0: {"stopped": True}}))

    def kill(self, steps: Sequence[Step]) -> None:
        for step in steps:
            assert isinstance(step, MemoryStep)
            self.killed.append(step.spec.name)
            step.end(Cause(step.spec.name, "signal", "killed by SIGKILL", 137))

    def release(self, step: Step) -> None:
        assert isinstance(step, MemoryStep)
        assert step.ended

    def explain(self, step: Step) -> str:
        return "component 1 is CANCELLED"

    def running(self) -> list[str]:
        return [step.spec.name for step in self.started if not step.ended]

    def step(self, name: str) -> MemoryStep:
        return next(step for step in reversed(self.started) if step.spec.name == name)


class World:
    """A run whose time passes in the supervisor's pauses; `at` says what happens when."""

    def __init__(self, root: Path, runner: MemoryRunner) -> None:
        self.run = RunDir.create(root)
        self.runner = runner
        self.now_s = 0.0
        self.events: list[tuple[float, str, object]] = []
        self.journal = Journal(self.run, "local", "1", clock=self.clock)
        self.interruption = Interruption()
        self.interruption.wait = self.pass_time  # type: ignore[method-assign]
        self.desired = desired_steps(fake_config(), fake_plan())
        write_desired(self.run, self.desired)

    def clock(self) -> float:
        return self.now_s

    def at(self, when_s: float, what: str, detail: object = None) -> None:
        self.events.append((when_s, what, detail))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < 1000, "the supervisor does not end"
        due = [event for event in self.events if event[0] <= self.now_s]
        self.events = [event for event in self.events if event[0] > self.now_s]
        for _, what, detail in sorted(due, key=lambda event: event[0]):
            self.happen(what, detail)

    def happen(self, what: str, detail: object) -> None:
        if what == "cancel":
            self.interruption.cause = self.interruption.cause or CANCEL
        elif what == "over":
            end_run(self.run, str(detail), "because")
        elif what == "desired":
            assert isinstance(detail, DesiredState)
            write_desired(self.run, detail)
        else:
            running = {step.spec.name: step for step in self.runner.started}
            if what in running:
                assert isinstance(detail, Success | Cause)
                running[what].end(detail)

    def supervise(self) -> Cause | None:
        return Supervisor(
            self.run,
            self.runner,
            self.journal,
            self.interruption,
            job_id="1",
            entry=entry,
            clock=self.clock,
            pause=self.pass_time,
            judge=lambda step, *_: step.verdict if isinstance(step, MemoryStep) else None,
            sweep=lambda _: [],
        ).run()

    def state(self) -> dict[str, object]:
        return self.run.read(self.run.state_json) or {}


@contextmanager
def world(runner: MemoryRunner | None = None) -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        made = World(Path(folder) / "run", runner or MemoryRunner())
        try:
            yield made
        finally:
            made.journal.close()
