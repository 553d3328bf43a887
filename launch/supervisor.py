"""The driver of a run: makes the running steps equal to the desired state, until the run is over or something fails.

It starts every step from the main thread, because a step dies (PDEATHSIG) with the thread that started it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from launch.interruption import Interruption
from launch.journal import Journal
from launch.steps import Entry, Incarnation, Step, StepRunner, StepStartError, StepStatus
from launch.sweep import Leftover, sweep
from launch.tracking import Tracked, first_failure, unfinished
from launch.verdict import Cause, Success, judge
from stages.desired import DesiredState, StepSpec, read_desired
from stages.files import wait_for
from stages.rundir import RunDir

TICK_S = 0.2
STOPPING_TICK_S = 0.05
DESIRED_WAIT_S = 60.0
FINISH_WAIT_S = 60.0
"""Time that trainer and controller have to end by themselves once the run was declared a success."""
KILL_AGAIN_S = 2.0
GIVE_UP_S = 10.0
"""After the grace: a process that survives KILL this long hangs in the kernel, and the job ends without it."""

Judge = Callable[[Step, StepStatus, float, float], Success | Cause | None]


class Supervisor:
    """One attempt of one run. Effects go through `runner`, `journal` and `sweep`; time through `clock` and `pause`."""

    def __init__(
        self,
        run: RunDir,
        runner: StepRunner,
        journal: Journal,
        interruption: Interruption,
        *,
        job_id: str,
        entry: Entry,
        timeout_min: int = 60,
        failure_grace_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        judge: Judge = judge,
        sweep: Callable[[str], list[Leftover]] = sweep,
    ) -> None:
        self._run = run
        self._runner = runner
        self._journal = journal
        self._interruption = interruption
        self._job_id = job_id
        self._entry = entry
        self._timeout_min = timeout_min
        self._failure_grace_s = failure_grace_s
        self._clock = clock
        self._pause = pause
        self._judge = judge
        self._sweep = sweep
        self._tracked: dict[str, Tracked] = {}
        self._starts: dict[str, int] = {}
        self._stop_seen_s: float | None = None
        self._is_ending = False

    def run(self) -> Cause | None:
        """Returns None after success, else the first fatal cause; in both cases no step runs any more.

        A fault of the supervisor itself is raised again once everything is stopped and the cause is written.
        """
        self._journal.phase("starting")
        try:
            cause = self._drive()
        except BaseException as error:
            self._finish(Cause("supervisor", "error", f"{type(error).__name__}: {error}"))
            raise
        self._finish(cause)
        return cause

    # ---- until it is over ---------------------------------------------------------------------------------------

    def _drive(self) -> Cause | None:
        desired = self._first_desired()
        if isinstance(desired, Cause):
            return desired
        while True:
            self._observe()
            # Read after looking at the steps: the controller writes it before it ends.
            desired = read_desired(self._run) or desired
            cause = self._cause(desired)
            if cause is None and desired.phase == "run":
                cause = self._reconcile(desired)
            if cause is not None:
                return cause
            if desired.phase == "stop" and not unfinished(self._tracked, desired):
                return None
            self._journal.beat()
            self._interruption.wait(TICK_S)

    def _first_desired(self) -> DesiredState | Cause:
        def look() -> tuple[DesiredState | Cause] | None:
            found = self._interruption.cause or read_desired(self._run)
            return None if found is None else (found,)

        (found,) = wait_for(
            look,
            deadline_s=DESIRED_WAIT_S,
            awaited=str(self._run.desired_json),
            from_whom="the launcher",
        )
        return found

    def _cause(self, desired: DesiredState) -> Cause | None:
        if self._interruption.cause is not None:
            return self._interruption.cause
        if self._journal.trouble is not None:
            return Cause("supervisor", "error", f"the state cannot be recorded: {self._journal.trouble}")
        failure = first_failure(self._tracked.values(), desired, self._clock())
        if failure is not None:
            return self._explained(*failure)
        if desired.phase == "stop" and desired.outcome == "failure":
            return Cause("controller", "requested", desired.reason or "asked for the end of the run")
        return self._late(desired)

    def _late(self, desired: DesiredState) -> Cause | None:
        """Trainer or controller that does not end although the run is over."""
        if desired.phase != "stop":
            return None
        now_s = self._clock()
        self._stop_seen_s = now_s if self._stop_seen_s is None else self._stop_seen_s
        running = unfinished(self._tracked, desired)
        if not running or now_s - self._stop_seen_s < FINISH_WAIT_S:
            return None
        return Cause(
            running[0], "late", f"had not ended {FINISH_WAIT_S:g} s after the controller declared the run over"
        )

    def _explained(self, cause: Cause, tracked: Tracked) -> Cause:
        if cause.kind not in ("stopped", "ended"):
            return cause
        more = self._runner.explain(tracked.step)
        return Cause(cause.step, cause.kind, f"{cause.message}: {more}" if more else cause.message, cause.exit_code)

    # ---- desired state -> steps ---------------------------------------------------------------------------------

    def _reconcile(self, desired: DesiredState) -> Cause | None:
        wanted = {spec.name for spec in desired.steps}
        self._ask([tracked for name, tracked in self._tracked.items() if name not in wanted])
        self._kill_overdue()
        for name in [name for name, item in self._tracked.items() if item.asked_s is not None and not item.is_alive]:
            del self._tracked[name]
            self._journal.forget(name)
        missing = [spec for spec in desired.steps if spec.name not in self._tracked]
        for spec in missing:
            if self._interruption.cause is not None:
                return self._interruption.cause
            try:
                self._start(spec)
            except StepStartError as error:
                return Cause(spec.name, "start", str(error))
        if missing:
            self._journal.phase("running")
        return None

    def _start(self, spec: StepSpec) -> None:
        """Steps are started one after the other: started together, which step gets which GPUs would be a race."""
        number = self._starts.get(spec.name, 0)
        self._starts[spec.name] = number + 1
        incarnation = Incarnation(spec, self._run, self._job_id, number)
        incarnation.write_pickle(self._entry, self._timeout_min)
        step = self._runner.start(incarnation)
        self._tracked[spec.name] = Tracked(step)
        self._journal.step(spec.name, state="running", pid=step.pid, started=time.time(), ended=None, exit_code=None)

    def _observe(self) -> None:
        for tracked in self._tracked.values():
            if tracked.is_open:
                self._look_at(tracked, self._clock())

    def _look_at(self, tracked: Tracked, now_s: float) -> None:
        just_ended = False
        if tracked.is_alive:
            tracked.status = tracked.step.status()
            just_ended = tracked.status.ended
            tracked.ended_s = now_s if just_ended else None
        waited_s = 0.0 if tracked.ended_s is None else now_s - tracked.ended_s
        tracked.verdict = self._judge(tracked.step, tracked.status, waited_s, self._runner.result_wait_s)
        if tracked.verdict is not None and tracked.seen_s is None:
            tracked.seen_s = now_s
        if just_ended:
            self._clean(tracked)

    def _clean(self, tracked: Tracked) -> None:
        """After a step's end: nothing of it is left on this host, and what it held is free."""
        if not self._is_ending:
            self._sweep_leftovers(tracked.step.incarnation.step_id)
        self._runner.release(tracked.step)
        code = next((code for code in tracked.status.exits.values() if code != 0), 0)
        state = "stopped" if tracked.asked_s is not None else "failed" if code else "ended"
        self._journal.step(tracked.spec.name, state=state, exit_code=code, ended=time.time())

    def _sweep_leftovers(self, prefix: str) -> None:
        for leftover in self._sweep(prefix):
            self._journal.event("leftover", pid=leftover.pid, command=leftover.command)

    # ---- stopping -----------------------------------------------------------------------------------------------

    def _ask(self, tracked: list[Tracked], most_grace_s: float = math.inf) -> None:
        asked = [item for item in tracked if item.is_alive and item.asked_s is None]
        if asked:
            self._runner.ask_to_stop([item.step for item in asked])
        for item in asked:
            item.asked_s, item.grace_s = self._clock(), min(item.spec.grace_s, most_grace_s)
            self._journal.step(item.spec.name, state="stopping")

    def _kill_overdue(self) -> None:
        now_s = self._clock()
        overdue = [item for item in self._tracked.values() if item.is_overdue(now_s, KILL_AGAIN_S)]
        if overdue:
            self._journal.event("kill", steps=[item.spec.name for item in overdue])
            self._runner.kill([item.step for item in overdue])
        for item in overdue:
            if item.killed_s is not None:
                # A grandchild that left the step still holds its output open, and with it the step.
                self._sweep_leftovers(item.step.incarnation.step_id)
            item.killed_s = now_s

    def _finish(self, cause: Cause | None) -> None:
        """Stop what runs, say how it ended. The cause is on disk before anything is stopped."""
        if cause is not None:
            self._journal.fatal(cause)
        self._journal.phase("stopping")
        self._end_steps(math.inf if cause is None else self._failure_grace_s)
        self._journal.phase("succeeded" if cause is None else "failed")

    def _end_steps(self, most_grace_s: float) -> None:
        """A step has its own grace after a success; after a failure nobody waits longer than `most_grace_s` for it."""
        self._is_ending = True
        self._ask(list(self._tracked.values()), most_grace_s)
        longest_s = max((item.grace_s for item in self._tracked.values()), default=0.0)
        give_up_s = self._clock() + longest_s + GIVE_UP_S
        self._observe()
        while any(item.is_alive for item in self._tracked.values()) and self._clock() < give_up_s:
            self._kill_overdue()
            self._journal.beat()
            self._pause(STOPPING_TICK_S)
            self._observe()
        left = [name for name, item in self._tracked.items() if item.is_alive]
        if left:
            self._journal.event("abandoned", steps=left)
        self._sweep_leftovers(f"{self._run.run_id}.{self._run.attempt}.")
