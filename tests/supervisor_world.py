"""A world for the supervisor's state machine: steps that exist only in memory, and a clock that the test owns."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launch.cancel_request import CancelRequest, write_cancel_request
from launch.desired_steps import desired_steps
from launch.fleet import Fleet
from launch.interruption import Interruption
from launch.job import CANCELLED, Job, RestartRefusedError, Termination
from launch.journal import Journal
from launch.steps import Incarnation, Step, StepRunner, StepStartError, StepStatus
from launch.stops import Requeued, Stop
from launch.supervisor import Limits, Supervisor
from launch.verdict import Cause, Success
from stages.desired import DesiredState, end_run, write_desired
from stages.rundir import RunDir
from stages.stopping import read_stop_request
from tests.fake_runs import fake_config, fake_plan
from tests.fake_stages import entry

Clock = Callable[[], float]
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Records are synced to disk; a file system in memory makes that free."""

CANCEL = Cause("supervisor", "cancelled", "the run was cancelled (SIGTERM)", 143)


class MemoryStep(Step):
    """`verdict` and `ended` are what the test makes of it."""

    pid = 1

    def __init__(self, incarnation: Incarnation, obeys: bool, started_s: float) -> None:
        super().__init__(incarnation)
        self.started_s = started_s
        self.obeys = obeys
        self.ended = False
        self.verdict: Success | Cause | None = None

    def status(self) -> StepStatus:
        return StepStatus(self.ended)

    def end(self, verdict: Success | Cause) -> None:
        if not self.ended:
            self.ended, self.verdict = True, verdict


class MemoryRunner(StepRunner):
    """`stubborn` steps ignore TERM; `broken` ones cannot be started. Nodes are called node0, node1, ...; some may be `lost`."""

    def __init__(self, stubborn: Sequence[str] = (), broken: Sequence[str] = (), nodes: int = 1) -> None:
        self.stubborn = stubborn
        self.broken = broken
        self.nodes = nodes
        self.lost: set[str] = set()
        self.ended_component = False
        self.clock: Clock = lambda: 0.0
        self.started: list[MemoryStep] = []
        self.asked: list[str] = []
        self.killed: list[str] = []

    def start(self, incarnation: Incarnation) -> Step:
        if incarnation.spec.name in self.broken:
            raise StepStartError("no room")
        assert incarnation.spec.name not in self.running(), "the same step twice at once"
        obeys = incarnation.spec.name not in self.stubborn
        self.started.append(MemoryStep(incarnation, obeys, self.clock()))
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

    def hosts(self, step: Step) -> tuple[str, ...]:
        return tuple(f"node{step.spec.node + index}" for index in range(step.spec.nodes))

    def find_lost(self, step: Step) -> tuple[str, ...]:
        return tuple(host for host in self.hosts(step) if host in self.lost)

    def is_place_gone(self, step: Step) -> bool:
        return self.ended_component or bool(self.find_lost(step))

    def usable_nodes(self, component: int) -> dict[int, str]:
        return {number: f"node{number}" for number in range(self.nodes) if f"node{number}" not in self.lost}

    def running(self) -> list[str]:
        return [step.spec.name for step in self.started if not step.ended]

    def step(self, name: str) -> MemoryStep:
        return next(step for step in reversed(self.started) if step.spec.name == name)


class MemoryJob(Job):
    """Lasts until `end_s` on the world's clock; a TERM means `term`; `refused` says why it cannot be run again."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("1")
        self._clock = clock
        self.end_s = math.inf
        self.term = CANCELLED
        self.ending = False
        self.refused = ""
        self.restarted: list[str] = []
        self.handed_over = False

    @property
    def limit_s(self) -> float:
        return self.end_s

    def time_left_s(self, *, exactly: bool = False) -> float:
        return self.end_s - self._clock()

    def why_term(self) -> Termination:
        return self.term

    def is_ending(self) -> bool:
        return self.ending

    def go_on(self, stop: Stop) -> Requeued:
        if self.refused:
            raise RestartRefusedError(self.refused)
        self.restarted.append(stop.kind)
        return Requeued("requeue", stop.reason, "1")

    def hand_over(self) -> None:
        self.handed_over = True


class World:
    """A run whose time passes in the supervisor's pauses; `at` says what happens when.

    After a stop request, trainer and controller end `save_s` later, as long as they run (None: they never do).
    """

    def __init__(self, root: Path, runner: MemoryRunner) -> None:
        self.run = RunDir.create(root)
        self.runner = runner
        runner.clock = self.clock
        self.now_s = 0.0
        self.save_s: float | None = 1.0
        self.stop_s: float | None = None
        self.limits = Limits()
        self.refusal = ""
        self.job = MemoryJob(self.clock)
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
        self.obey_stop_request()

    def obey_stop_request(self) -> None:
        if self.save_s is None or read_stop_request(self.run) is None:
            return
        self.stop_s = self.now_s if self.stop_s is None else self.stop_s
        if self.now_s - self.stop_s >= self.save_s:
            for name in ("trainer", "controller"):
                if name in self.runner.running():
                    self.runner.step(name).end(Success({0: {"stopped_at": 7}}))

    def has_ended(self, name: str) -> bool:
        return name in {step.spec.name for step in self.runner.started} and name not in self.runner.running()

    def happen(self, what: str, detail: object) -> None:
        if what == "cancel":
            self.interruption.cause = self.interruption.cause or CANCEL
        elif what == "ending":
            self.job.ending = True
        elif what == "warning":
            self.interruption.warning = "SIGUSR1"
        elif what == "ask":
            write_cancel_request(self.run, CancelRequest(checkpoint=bool(detail), by="me@here"))
        elif what == "lose":
            self.runner.lost.add(str(detail))
        elif what == "over":
            end_run(self.run, str(detail), "because")
        elif what == "over, says the controller":  # one that is gone says nothing
            if not self.has_ended("controller"):
                end_run(self.run, str(detail), "because")
        elif what == "desired":
            assert isinstance(detail, DesiredState)
            write_desired(self.run, detail)
        else:
            running = {step.spec.name: step for step in self.runner.started}
            if what in running:
                assert isinstance(detail, Success | Cause)
                running[what].end(detail)

    def supervise(self) -> Cause | Requeued | None:
        fleet = Fleet(
            self.run,
            self.runner,
            self.journal,
            job_id="1",
            entry=entry,
            clock=self.clock,
            pause=self.pass_time,
            judge=lambda step, *_: step.verdict if isinstance(step, MemoryStep) else None,
            sweep=lambda _: [],
        )
        return Supervisor(
            self.run,
            fleet,
            self.journal,
            self.interruption,
            self.job,
            self.limits,
            refusal=lambda: self.refusal,
        ).run()

    def restarts_of(self, name: str) -> list[float]:
        """When the step was started again."""
        return [step.started_s for step in self.runner.started if step.spec.name == name][1:]

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
