"""The steps of one attempt: started one after the other, looked at, asked to stop, killed when they do not."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from launch.journal import Journal
from launch.steps import Entry, Incarnation, Step, StepRunner, StepStatus
from launch.sweep import Leftover, sweep
from launch.tracking import Tracked
from launch.verdict import Cause, Success, judge
from stages.desired import StepSpec
from stages.rundir import RunDir

STOPPING_TICK_S = 0.05
KILL_AGAIN_S = 2.0
GIVE_UP_S = 10.0
"""After the grace: a process that survives KILL this long hangs in the kernel, and the job ends without it."""

Judge = Callable[[Step, StepStatus, float, float], Success | Cause | None]


class Fleet:
    """Effects go through `runner`, `journal` and `sweep`; time through `clock` and `pause`.

    `tracked` has the steps that run, or whose end still means something, by name: a step of a name is started only when none
    of that name is tracked, so no step runs twice at once.
    """

    def __init__(
        self,
        run: RunDir,
        runner: StepRunner,
        journal: Journal,
        *,
        job_id: str,
        entry: Entry,
        timeout_min: int = 60,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        judge: Judge = judge,
        sweep: Callable[[str], list[Leftover]] = sweep,
    ) -> None:
        self.runner = runner
        self.tracked: dict[str, Tracked] = {}
        self.clock = clock
        self._run = run
        self._journal = journal
        self._job_id = job_id
        self._entry = entry
        self._timeout_min = timeout_min
        self._pause = pause
        self._judge = judge
        self._sweep = sweep
        self._starts: Counter[str] = Counter()
        self._is_ending = False

    # ---- starting and looking -------------------------------------------------------------------------------------

    def start(self, spec: StepSpec) -> None:
        """Raises StepStartError. One step after the other: started together, which gets which GPUs would be a race."""
        assert spec.name not in self.tracked
        number = self._starts[spec.name]
        self._starts[spec.name] += 1
        incarnation = Incarnation(spec, self._run, self._job_id, number)
        incarnation.write_pickle(self._entry, self._timeout_min)
        step = self.runner.start(incarnation)
        self.tracked[spec.name] = Tracked(step)
        self._journal.step(
            spec.name,
            state="running",
            pid=step.pid,
            hosts=list(self.runner.hosts(step)),
            started=time.time(),
            ended=None,
            exit_code=None,
        )

    def starts(self, name: str) -> int:
        """How often the step was started, or tried to."""
        return self._starts[name]

    def observe(self) -> None:
        for tracked in self.tracked.values():
            if tracked.is_open:
                self._look_at(tracked, self.clock())

    def _look_at(self, tracked: Tracked, now_s: float) -> None:
        just_ended = False
        if tracked.is_alive:
            tracked.status = tracked.step.status()
            just_ended = tracked.status.ended
            tracked.ended_s = now_s if just_ended else None
        waited_s = 0.0 if tracked.ended_s is None else now_s - tracked.ended_s
        tracked.verdict = self._judge(tracked.step, tracked.status, waited_s, self.runner.result_wait_s)
        if tracked.verdict is not None and tracked.seen_s is None:
            tracked.seen_s = now_s
        if just_ended:
            self._clean(tracked)

    def _clean(self, tracked: Tracked) -> None:
        """After a step's end: nothing of it is left on this host, and what it held is free."""
        if not self._is_ending:
            self._sweep_leftovers(tracked.step.incarnation.step_id)
        self.runner.release(tracked.step)
        code = next((code for code in tracked.status.exits.values() if code != 0), 0)
        state = "stopped" if tracked.asked_s is not None else "failed" if code else "ended"
        self._journal.step(tracked.spec.name, state=state, exit_code=code, ended=time.time())

    def _sweep_leftovers(self, prefix: str) -> None:
        for leftover in self._sweep(prefix):
            self._journal.event("leftover", pid=leftover.pid, command=leftover.command)

    # ---- stopping -------------------------------------------------------------------------------------------------

    def ask(self, tracked: Sequence[Tracked], most_grace_s: float = math.inf) -> None:
        """Ask steps to stop; after their grace, at most `most_grace_s`, `kill_overdue` kills them."""
        asked = [item for item in tracked if item.is_alive and item.asked_s is None]
        if asked and most_grace_s > 0:
            self.runner.ask_to_stop([item.step for item in asked])
        for item in asked:
            item.asked_s, item.grace_s = self.clock(), min(item.spec.grace_s, most_grace_s)
            self._journal.step(item.spec.name, state="stopping")

    def kill_overdue(self) -> None:
        now_s = self.clock()
        overdue = [item for item in self.tracked.values() if item.is_overdue(now_s, KILL_AGAIN_S)]
        if overdue:
            self._journal.event("kill", steps=[item.spec.name for item in overdue])
            self.runner.kill([item.step for item in overdue])
        for item in overdue:
            if item.killed_s is not None:
                # A grandchild that left the step still holds its output open, and with it the step.
                self._sweep_leftovers(item.step.incarnation.step_id)
            item.killed_s = now_s

    def reap(self) -> list[Tracked]:
        """Steps that were asked to stop and have ended; they are tracked no more."""
        gone = [item for item in self.tracked.values() if item.asked_s is not None and not item.is_alive]
        for item in gone:
            del self.tracked[item.spec.name]
        return gone

    def end(self, most_grace_s: float = math.inf) -> None:
        """Stop everything; returns when nothing runs any more, at the latest GIVE_UP_S after the longest grace."""
        self._is_ending = True
        self.ask(list(self.tracked.values()), most_grace_s)
        longest_s = max((item.grace_s for item in self.tracked.values()), default=0.0)
        give_up_s = self.clock() + longest_s + GIVE_UP_S
        self.observe()
        while any(item.is_alive for item in self.tracked.values()) and self.clock() < give_up_s:
            self.kill_overdue()
            self._journal.beat()
            self._pause(STOPPING_TICK_S)
            self.observe()
        left = [name for name, item in self.tracked.items() if item.is_alive]
        if left:
            self._journal.event("abandoned", steps=left)
        self._sweep_leftovers(f"{self._run.run_id}.{self._run.attempt}.")
