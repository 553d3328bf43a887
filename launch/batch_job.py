"""The Slurm job that a supervisor is the batch script of: its limit, what its TERM means, and how it is run again.

`scontrol -o show job` answers all of it. On 22.05 a job that Slurm takes back (a node failed, an administrator or a preemption
requeued it) has its Restarts raised before TERM arrives, which tells it from a cancelled one (tried).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from launch import slurm
from launch.chain import Chained
from launch.job import CANCELLED, Job, RestartRefusedError, Termination
from launch.job_states import job_phase
from launch.stops import Requeued, Stop
from stages.rundir import RunDir

ASK_S = 60.0
"""The limit is asked for again after so long: somebody may have changed it."""
QUICK_S = 3.0
"""A supervisor that was asked to end has no time for a slow controller."""
LOG_BYTES = 65536
NODE_FAILURE = "DUE TO NODE FAILURE"
TIME_LIMIT = "DUE TO TIME LIMIT"
PREEMPTION = "DUE TO PREEMPTION"
"""slurmstepd's words in the job's own output, before it sends TERM."""
COMPLETING = "COMPLETING"


@dataclass(frozen=True)
class JobFacts:
    """Of the leader. Times are of the wall clock, None when Slurm shows none. `restarts` as SLURM_RESTART_COUNT of the next run.

    `state` is one word: COMPLETING from the order to end the job until its last process is gone, whatever comes after that.
    """

    start: float | None
    end: float | None
    restarts: int
    preempted: float | None
    state: str

    @property
    def is_ending(self) -> bool:
        return self.state == COMPLETING or job_phase(self.state).is_over


def parse_facts(text: str) -> JobFacts | None:
    """The first record of `scontrol -o show job J`; None when there is none."""
    for values in slurm.records(text, "JobId"):
        restarts = values.get("Restarts", "0")
        return JobFacts(
            _wall(values.get("StartTime", "")),
            _wall(values.get("EndTime", "")),
            int(restarts) if restarts.isdigit() else 0,
            _wall(values.get("PreemptTime", "")),
            values.get("JobState", ""),
        )
    return None


def _wall(text: str) -> float | None:
    """Slurm's "2026-11-30T01:41:14" (local time) as seconds of the wall clock; None for "Unknown", "None", "N/A"."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


@contextmanager
def _term_ignored() -> Iterator[None]:
    """The TERM of a requeued job goes to all its processes, also to the scontrol that asks for it (seen on 22.05)."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class BatchJob(Job):
    """`restarts` is this run's SLURM_RESTART_COUNT; `chain` submits the job that comes after this one."""

    def __init__(
        self,
        run: RunDir,
        job_id: str,
        restarts: int,
        how: str,
        chain: Callable[[], Chained],
        excluded: Callable[[], Iterable[str]] = tuple,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(job_id)
        self._run = run
        self._restarts = restarts
        self._how = how
        self._chain = chain
        self._excluded = excluded
        self._clock = clock
        self._wall = wall
        self._facts: JobFacts | None = None
        self._asked_s = -math.inf
        self._chained: Chained | None = None
        self._log = run.logs / "supervisor.log"
        self._log_start = self._log.stat().st_size if self._log.exists() else 0

    @property
    def limit_s(self) -> float:
        facts = self._facts
        if facts is None or facts.start is None or facts.end is None:
            return math.inf
        return facts.end - facts.start

    def time_left_s(self, *, exactly: bool = False) -> float:
        if exactly or self._clock() - self._asked_s >= ASK_S:
            self._asked_s = self._clock()
            # Once something is known, a controller that does not answer must not hold up the supervisor's loop.
            self._facts = self._ask(QUICK_S if self._facts else slurm.COMMAND_TIMEOUT_S) or self._facts
        end = None if self._facts is None else self._facts.end
        return math.inf if end is None else end - self._wall()

    def why_term(self) -> Termination:
        facts = self._ask(QUICK_S)
        if facts is None:
            return CANCELLED
        is_requeued, said = facts.restarts > self._restarts, self._said_since_start()
        if NODE_FAILURE in said:
            return Termination("node_failure", is_requeued)
        if facts.preempted is not None or PREEMPTION in said:
            return Termination("preempted", is_requeued)
        if is_requeued:
            return Termination("requeued", True)
        # Not from EndTime: Slurm sets it to the present for a job that is cancelled.
        return Termination("time_limit") if TIME_LIMIT in said else CANCELLED

    def is_ending(self) -> bool:
        facts = self._ask(QUICK_S)
        return facts is not None and facts.is_ending

    def _said_since_start(self) -> str:
        """The job's own output without that of its earlier runs, which ended for their own reasons."""
        try:
            with self._log.open("rb") as log:
                log.seek(self._log_start)
                return log.read()[-LOG_BYTES:].decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def go_on(self, stop: Stop) -> Requeued:
        if self._how == "never":
            raise RestartRefusedError("slurm.requeue=never; go on with: python -m launch.resume RUN")
        refused = ""
        if self._how != "chain":
            refused = self._requeue()
            if not refused:
                return Requeued("requeue", stop.reason, self.job_id)
            if self._how == "requeue":
                raise RestartRefusedError(
                    f"{refused}; set slurm.requeue=chain, or go on with: python -m launch.resume RUN"
                )
            print(f"{refused}; a job of its own follows this one", flush=True)
        try:
            self._chained = self._chain()
        except slurm.SlurmCommandError as error:
            first = f"{refused}; " if refused else ""
            raise RestartRefusedError(
                f"{first}no job could be submitted: {error}; go on with: python -m launch.resume RUN"
            ) from error
        return Requeued("chain", stop.reason, self._chained.job_id)

    def hand_over(self) -> None:
        if self._chained is not None:
            try:
                self._chained.start_attempt()
            except slurm.SlurmCommandError as error:
                job_id = self._chained.job_id
                print(f"warning: job {job_id} is held; run: scontrol release {job_id} ({error})", flush=True)
            return
        hosts = ",".join(self._excluded())
        if hosts:
            self._exclude(hosts)

    def _requeue(self) -> str:
        """Why Slurm refused; "" when the job is requeued. TERM comes right after, so this is the last thing to do."""
        try:
            with _term_ignored():
                slurm.command(["scontrol", "requeue", self.job_id])
        except slurm.SlurmCommandError as error:
            return str(error)
        return ""

    def _exclude(self, hosts: str) -> None:
        """Of the requeued job, which alone may be changed. After the last word: KILL may come at any time."""
        try:
            with _term_ignored():
                slurm.command(["scontrol", "update", f"JobId={self.job_id}", f"ExcNodeList={hosts}"])
        except slurm.SlurmCommandError as error:
            print(f"warning: the job may get the nodes {hosts} again: {error}", flush=True)

    def _ask(self, timeout_s: float = slurm.COMMAND_TIMEOUT_S) -> JobFacts | None:
        """None when Slurm does not answer."""
        try:
            return parse_facts(slurm.command(["scontrol", "-o", "show", "job", self.job_id], timeout_s))
        except slurm.SlurmCommandError:
            return None
