"""A run inside the allocation that this shell has: no sbatch, the same pickled supervisor as a child of the launcher.

The launcher of a batch script stands where the supervisor stands in a job of our own: Slurm signals the batch shell alone, which
the wrappers replace by the launcher (`exec`). So USR1 (the limit is near) and TERM (cancelled) are passed on, and the launcher ends
with the run's exit code. When the launcher dies, the kernel tells the supervisor (TERM), which stops its steps in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from types import FrameType
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths

from launch.allocation import Held
from launch.life import HandedOverError, Life, LocalLife, Sign
from launch.local import link_log
from launch.metrics import from_here
from launch.steps import Entry
from launch.submission import LocalSubmission
from launch.supervise import supervise
from stages.process import die_with_parent
from stages.rundir import RunDir

PASSED_ON = {
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR1,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}
"""What the supervisor gets for what the launcher gets. USR2 is the signal that submitit's own scripts ask for."""


class SupervisorProcess:
    """The supervisor as a child: the part of a submitit job that `LocalSubmission` looks at."""

    def __init__(self, job_id: str, process: subprocess.Popen[bytes]) -> None:
        self.job_id = job_id
        self.process = process

    def exit_status(self) -> int | None:
        return self.process.poll()

    def send(self, signum: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signum)

    def cancel(self) -> None:
        """TERM; the supervisor stops the steps in order."""
        self.send(signal.SIGTERM)


class AllocationSubmission(LocalSubmission):
    """`mode` is what others need to know: a batch job ends with its run, salloc goes on."""

    def __init__(self, run: RunDir, process: SupervisorProcess, where: Held) -> None:
        super().__init__(run, process)
        self.mode = "slurm" if where.is_batch else "allocation"
        self._attempt = run.attempt + where.restarts

    def life(self) -> Life:
        return AllocationLife(self, self._attempt)


class AllocationLife(LocalLife):
    """Ends the following when the run goes on without this launcher, whose supervisor makes attempt `attempt`."""

    def __init__(self, submission: AllocationSubmission, attempt: int) -> None:
        super().__init__(submission)
        self._attempt = attempt

    def look(self, run: RunDir, state: Mapping[str, Any]) -> Sign:
        """Raises HandedOverError."""
        if run.attempt > self._attempt or (run.attempt == self._attempt and state.get("phase") == "requeued"):
            raise HandedOverError(f"the run goes on without this shell: python -m launch.follow {from_here(run.root)}")
        return super().look(run, state)


def submit_inside(run: RunDir, python: str, time_min: int, where: Held, entry: Entry) -> AllocationSubmission:
    """Leave the supervisor's pickle where submitit looks for it, and start it. Main thread only."""
    submission = DelayedSubmission(supervise, str(run.root), run.attempt, entry)
    submission.set_timeout(time_min, 0)
    submission.dump(JobPaths(run.submitit, where.job_id).submitted_pickle)
    link_log(run.submitit, where.job_id)
    return start_inside(run, python, where)


def start_inside(run: RunDir, python: str, where: Held) -> AllocationSubmission:
    """Start the supervisor whose pickle is there, in the first run of the job or a later one; pass signals on to it.

    `run` is opened at the attempt that the job began with. It has a session of its own: Ctrl-C reaches the launcher only, which ends
    the run in order.
    """
    launcher = os.getpid()
    environment = {**os.environ, "SUBMITIT_EXECUTOR": "slurm"}
    with (run.logs / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [python, "-u", "-m", "submitit.core._submit", str(run.submitit)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(launcher, signal.SIGTERM),
        )
    child = SupervisorProcess(where.job_id, process)
    _pass_signals_on(child)
    return AllocationSubmission(run, child, where)


def _pass_signals_on(child: SupervisorProcess) -> None:
    def pass_on(signum: int, _frame: FrameType | None) -> None:
        child.send(PASSED_ON[signal.Signals(signum)])

    for signum in PASSED_ON:
        signal.signal(signum, pass_on)
    signal.signal(signal.SIGCONT, signal.SIG_IGN)  # Slurm sends CONT with every TERM
