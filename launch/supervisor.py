"""The driver of a run: makes the running steps equal to the desired state, until the attempt is over.

It starts every step from the main thread, because a step dies (PDEATHSIG) with the thread that started it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from launch.cancel_request import read_cancel_request
from launch.fleet import Fleet
from launch.heartbeats import Silence
from launch.interruption import Interruption
from launch.job import Job, RestartRefusedError
from launch.journal import Journal
from launch.measured import CheckpointTimes
from launch.replacing import Restarts
from launch.steps import StepStartError
from launch.stops import Requeued, Stop, grace_s, lead_s
from launch.tracking import Tracked, failures, unfinished
from launch.verdict import Cause
from stages.desired import DesiredState, read_desired
from stages.files import wait_for
from stages.rundir import RunDir
from stages.stopping import StopRequest, write_stop_request

TICK_S = 0.2
DESIRED_WAIT_S = 60.0
FINISH_WAIT_S = 60.0
"""Time that trainer and controller have to end by themselves once the run was declared a success."""
LOOK_S = 1.0
"""Pause between looks for a request of people's, and at the time that is left."""
TERM_WAIT_S = 15.0
"""For the TERM of a job that Slurm is ending; KILL follows it after KillWait (30 s by default)."""
ENDED_OUTSIDE = "the run was cancelled (Slurm is ending its job, no TERM has come)"
ENDING_S = 15.0
"""Kept of the allocation for ending the steps and asking for the next attempt, once the checkpoint is there."""


TIME_LIMIT_CODE = 124
TERMINATIONS = {
    "node_failure": "a node of the job failed",
    "requeued": "the job was requeued",
    "preempted": "the job was preempted",
    "time_limit": "the time limit was reached",
}


@dataclass(frozen=True)
class Limits:
    """What the configuration says about ends. `min_instances` is 0 when every instance of the plan is needed."""

    failure_grace_s: float = 5.0
    min_instances: int = 0
    heartbeat_timeout_s: float = 60.0


class Supervisor:
    """One attempt of one run. Effects go through `fleet`, `journal` and `job`; time through the fleet's clock."""

    def __init__(
        self,
        run: RunDir,
        fleet: Fleet,
        journal: Journal,
        interruption: Interruption,
        job: Job,
        limits: Limits,
        *,
        refusal: Callable[[], str],
    ) -> None:
        """`refusal` says why the run must not be started again by itself; "" when it may."""
        self._run = run
        self._fleet = fleet
        self._journal = journal
        self._interruption = interruption
        self._job = job
        self._limits = limits
        self._refusal = refusal
        self._clock = fleet.clock
        self._silence = Silence(run, limits.heartbeat_timeout_s, self._clock)
        self._restarts = Restarts(
            run,
            fleet,
            journal,
            self._silence,
            min_instances=limits.min_instances,
            failure_grace_s=limits.failure_grace_s,
            clock=self._clock,
        )
        self._times = CheckpointTimes(run)
        self._stop_seen_s: float | None = None
        self._next_look_s = -math.inf

    def run(self) -> Cause | Requeued | None:
        """None after success, the first fatal cause after a failure, or how the run goes on; no step runs any more.

        A fault of the supervisor itself is raised again once everything is stopped and the cause is written.
        """
        self._journal.phase("starting")
        try:
            verdict = self._drive()
            if isinstance(verdict, Stop):
                verdict = self._stop(verdict)
        except BaseException as error:
            self._finish(Cause("supervisor", "error", f"{type(error).__name__}: {error}"))
            raise
        return self._finish(verdict)

    # ---- until it is over ---------------------------------------------------------------------------------------

    def _drive(self) -> Cause | Stop | None:
        desired = self._first_desired()
        if isinstance(desired, Cause):
            return desired
        while True:
            self._fleet.observe()
            # Read after looking at the steps: the controller writes it before it ends.
            desired = read_desired(self._run) or desired
            verdict = self._order() or self._trouble(desired)
            if verdict is None and desired.phase == "run":
                verdict = self._reconcile(desired)
            if verdict is not None:
                return verdict
            if desired.phase == "stop" and not unfinished(self._fleet.tracked, desired):
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

    def _order(self) -> Cause | Stop | None:
        """What somebody outside wants: by signal, by request, or the clock."""
        if self._interruption.cause is not None:
            return self._terminated(self._interruption.cause)
        if self._journal.trouble is not None:
            return Cause("supervisor", "error", f"the state cannot be recorded: {self._journal.trouble}")
        if self._interruption.warning:
            return self._warned(self._interruption.warning)
        if self._clock() < self._next_look_s:
            return None
        self._next_look_s = self._clock() + LOOK_S
        return self._requested() or self._out_of_time()

    def _warned(self, signal_name: str) -> Stop:
        """Slurm sends the same signal before the limit and, where the cluster says so, at a preemption."""
        if self._job.why_term().kind == "preempted":
            return Stop("preempted", f"{TERMINATIONS['preempted']} ({signal_name})", exit_code=143)
        return Stop("time_limit", f"the time limit is near ({signal_name})", exit_code=TIME_LIMIT_CODE)

    def _terminated(self, cause: Cause) -> Cause | Stop:
        """A TERM may be Slurm's way of taking the nodes for the moment only."""
        why = self._job.why_term()
        if why.kind == "cancelled":
            return cause
        code = TIME_LIMIT_CODE if why.kind == "time_limit" else cause.exit_code
        return Stop(why.kind, TERMINATIONS[why.kind], exit_code=code, is_requeued=why.is_requeued, is_late=True)

    def _taken_back(self, cause: Cause) -> Cause | Stop | None:
        """What ended the whole job, when a step's end is only a part of that; None when the step's end is its own.

        A preemption that leaves time (GraceTime) sends its TERM to the steps alone: the supervisor hears of it by their end.
        Everything else sends it to every node at once, and a busy batch host may be the last to pass it on (seen: by seconds).
        """
        if cause.kind == "node":
            return None
        if cause.kind == "stopped":
            verdict = self._terminated(Cause("supervisor", "cancelled", ""))
            if isinstance(verdict, Stop):
                return verdict
        if not self._job.is_ending():
            return None
        self._journal.event("job_is_ending", step=cause.step, message=cause.message)
        end_s = self._clock() + TERM_WAIT_S
        while self._interruption.cause is None and self._clock() < end_s:
            self._journal.beat()
            self._interruption.wait(TICK_S)
        return self._terminated(self._interruption.cause or Cause("supervisor", "cancelled", ENDED_OUTSIDE, 143))

    def _requested(self) -> Cause | Stop | None:
        request = read_cancel_request(self._run)
        if request is None:
            return None
        if request.checkpoint:
            return Stop("cancelled", request.reason, again=False, exit_code=143)
        return Cause("supervisor", "cancelled", request.reason, 143)

    def _out_of_time(self) -> Stop | None:
        needed_s = lead_s(self._times.latest(), self._job.limit_s)
        if self._job.time_left_s() >= needed_s or self._job.time_left_s(exactly=True) >= needed_s:
            return None
        reason = (
            f"the time limit is near ({self._job.time_left_s():.0f} s left, a checkpoint may take {needed_s:.0f} s)"
        )
        return Stop("time_limit", reason, exit_code=TIME_LIMIT_CODE)

    def _trouble(self, desired: DesiredState) -> Cause | Stop | None:
        for cause, item in failures(self._fleet.tracked.values(), desired, self._clock()):
            verdict = self._taken_back(cause) or self._restarts.respond(item, self._explained(cause, item), desired)
            if verdict is not None:
                return verdict
        if desired.phase == "stop" and desired.outcome == "failure":
            return Cause("controller", "requested", desired.reason or "asked for the end of the run")
        return self._late(desired) if desired.phase == "stop" else self._silent(desired)

    def _silent(self, desired: DesiredState) -> Cause | Stop | None:
        for item, still_s in self._silence.find(self._fleet.tracked.values()):
            words = f"its heartbeat stood still for {still_s:.0f} s (limit: rollout.heartbeat_timeout_s)"
            verdict = self._restarts.respond(item, Cause(item.spec.name, "silent", words), desired)
            if verdict is not None:
                return verdict
        return None

    def _late(self, desired: DesiredState) -> Cause | None:
        """Trainer or controller that does not end although the run is over."""
        now_s = self._clock()
        self._stop_seen_s = now_s if self._stop_seen_s is None else self._stop_seen_s
        running = unfinished(self._fleet.tracked, desired)
        if not running or now_s - self._stop_seen_s < FINISH_WAIT_S:
            return None
        return Cause(
            running[0], "late", f"had not ended {FINISH_WAIT_S:g} s after the controller declared the run over"
        )

    def _explained(self, cause: Cause, tracked: Tracked) -> Cause:
        if cause.kind not in ("stopped", "ended"):
            return cause
        more = self._fleet.runner.explain(tracked.step)
        return replace(cause, message=f"{cause.message}: {more}") if more else cause

    # ---- desired state -> steps ---------------------------------------------------------------------------------

    def _reconcile(self, desired: DesiredState) -> Cause | Stop | None:
        wanted = {spec.name for spec in desired.steps}
        self._fleet.ask([item for name, item in self._fleet.tracked.items() if name not in wanted])
        self._fleet.kill_overdue()
        for item in self._fleet.reap():
            if not self._restarts.reaped(item.spec.name):
                self._journal.forget(item.spec.name)
        missing = self._restarts.to_start(desired)
        for spec in missing:
            if self._interruption.cause is not None:
                return self._terminated(self._interruption.cause)
            try:
                self._fleet.start(spec)
            except StepStartError as error:
                verdict = self._restarts.not_started(spec, Cause(spec.name, "start", str(error)), desired)
                if verdict is not None:
                    return verdict
            else:
                self._restarts.started(spec.name)
        if missing:
            self._journal.phase("running")
        return None

    # ---- the end ------------------------------------------------------------------------------------------------

    def _stop(self, stop: Stop) -> Cause | Stop | None:
        """Ask for a checkpoint, and wait until trainer and controller have ended; then the attempt may be ended."""
        self._journal.note(stop={"kind": stop.kind, "reason": stop.reason})
        if stop.is_requeued or (stop.is_late and stop.kind != "preempted"):
            return stop  # Slurm has sent TERM to every step, and KILL follows soon
        left_s = max(0.0, self._job.time_left_s(exactly=True))
        most_s = min(grace_s(self._times.latest()), max(left_s - ENDING_S, left_s / 2))
        self._journal.event("stop", kind=stop.kind, reason=stop.reason, grace_s=round(most_s, 1))
        self._journal.phase("stopping")
        self._interruption.allow(most_s)
        write_stop_request(self._run, StopRequest("checkpoint", stop.reason, most_s))
        end_s = self._clock() + most_s
        while self._clock() < end_s:
            self._fleet.observe()
            desired = read_desired(self._run)
            if desired is None or not self._working():
                return self._stopped(stop, desired)
            verdict = self._hurried()
            if isinstance(verdict, Stop) and verdict.kind == "cancelled":
                stop, verdict = verdict, None  # the checkpoint is being made already; the run ends with it
            verdict = verdict or self._failed_meanwhile(stop, desired)
            if verdict is not None:
                return verdict
            self._fleet.kill_overdue()
            self._journal.beat()
            self._interruption.wait(TICK_S)
        self._journal.event("no_checkpoint_in_time", waited_s=round(most_s, 1), running=self._working())
        return stop

    def _working(self) -> list[str]:
        """Trainer and controller, while they run."""
        items = self._fleet.tracked.values()
        return [
            item.spec.name for item in items if not item.spec.is_service and (item.is_alive or item.verdict is None)
        ]

    def _stopped(self, stop: Stop, desired: DesiredState | None) -> Cause | Stop | None:
        """Both have ended. The run may just have come to its own end meanwhile."""
        if desired is None:
            return stop
        is_over = desired.phase == "stop" and desired.outcome == "success"
        if is_over and not unfinished(self._fleet.tracked, desired):
            return None
        return self._failed_meanwhile(stop, desired) or stop

    def _hurried(self) -> Cause | Stop | None:
        """A second order: now, without a checkpoint (a Cause); or a Stop, by Slurm, or by people with the checkpoint."""
        if self._interruption.cause is not None:
            return self._terminated(self._interruption.cause)
        if self._clock() < self._next_look_s:
            return None
        self._next_look_s = self._clock() + LOOK_S
        return self._requested()

    def _failed_meanwhile(self, stop: Stop, desired: DesiredState) -> Cause | None:
        """A trainer that cannot save, say. After the loss of a node everything may fail, and that is known already."""
        if desired.phase == "stop" and desired.outcome == "failure":
            return Cause("controller", "requested", desired.reason or "asked for the end of the run")
        if stop.kind in ("node_failure", "preempted"):
            return None
        over = replace(desired, phase="run", outcome=None)
        for cause, item in failures(self._fleet.tracked.values(), over, self._clock()):
            if not item.spec.is_service and cause.kind not in ("ended", "stopped"):
                return cause
        return None

    def _finish(self, verdict: Cause | Stop | None) -> Cause | Requeued | None:
        """Stop what runs, say how it ended. A cause is on disk before anything is stopped."""
        if isinstance(verdict, Cause):
            self._journal.fatal(verdict)
        self._journal.phase("stopping")
        self._fleet.end(math.inf if verdict is None else self._limits.failure_grace_s)
        ending = self._go_on(verdict) if isinstance(verdict, Stop) else verdict
        if isinstance(ending, Requeued):
            self._journal.event("requeued", **asdict(ending))
            self._journal.note(next=asdict(ending), reason=ending.reason)
            self._journal.phase("requeued")
            self._job.hand_over()
            return ending
        if ending is not None and ending is not verdict:
            self._journal.fatal(ending)
        self._journal.phase("succeeded" if ending is None else "failed")
        return ending

    def _go_on(self, stop: Stop) -> Requeued | Cause:
        """After a stop everything is ended; the next attempt is asked for last, from here alone, and not once people want the
        end. What Slurm has requeued already starts nevertheless, and ends then (`launch.attempts.cancelled_before`)."""
        requested = self._requested() if stop.again else stop
        if isinstance(requested, Cause):
            return requested
        if requested is not None:
            return requested.failed(self._saved())
        refusal = self._refusal()
        if refusal:
            return stop.failed(refusal)
        if stop.is_requeued:
            return Requeued("slurm", stop.reason, self._job.job_id)
        try:
            return self._job.go_on(stop)
        except RestartRefusedError as error:
            return stop.failed(f"{self._saved()}; {error}")

    def _saved(self) -> str:
        steps = self._run.published_checkpoints()
        return f"its newest checkpoint is step_{max(steps):06d}" if steps else "there is no checkpoint"
