"""Submitting a run: a heterogeneous Slurm job, or its local pair. The supervisor is the same callable in both."""

from __future__ import annotations

import os
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import submitit
from submitit.core.core import InfoWatcher, PicklingExecutor
from submitit.core.utils import DelayedSubmission, FailedJobError
from submitit.slurm.slurm import SlurmJob

from conf.schema import LibraConfig
from launch import slurm
from launch.desired_steps import desired_steps
from launch.errors import LibraError
from launch.hetjob import HetJobSpec, check_path, config_python, job_spec, render, render_job
from launch.local import LocalPairExecutor, LocalPairJob, link_log
from launch.machine import has_slurm
from launch.scrub import is_foreign
from launch.slurm import JobPhase, signal_name
from launch.steps import Entry, exception_text, tail
from launch.supervise import supervise
from launch.sweep import sweep
from planner.plan import Plan
from stages.desired import write_desired
from stages.entry import run_stage
from stages.files import write_bytes_atomic
from stages.rundir import RunDir

QUEUE_FIRST_S = 1.0
QUEUE_LAST_S = 10.0
STALLED_S = 4.0
"""A supervisor whose heartbeat stands still this long is asked about at once."""


class SubmitError(LibraError):
    """Slurm refused the job; the message is Slurm's own."""


class ArrayRefusedError(TypeError):
    """A heterogeneous job cannot be an array (Slurm rejects `--array` on any component)."""


class HetJobWatcher(InfoWatcher):
    """State of hetjobs without sacct: squeue, then scontrol. submitit asks it, shared by all jobs of the class."""

    def update(self) -> None:
        self._num_calls += 1
        self._last_status_check = time.time()
        for job_id in self._registered - self._finished:
            self._info_dict[job_id] = self._ask(job_id)
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)

    def _ask(self, job_id: str) -> dict[str, str]:
        try:
            components = slurm.query(int(job_id))
        except slurm.SlurmCommandError as error:
            return {"State": "UNKNOWN", "Reason": str(error)}
        if not components:
            return {"State": "GONE", "Reason": "Slurm does not know the job any more"}
        folded = slurm.fold(components)
        return {"State": folded.state, "Reason": folded.text, "NodeList": folded.nodes}

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode=mode).get("State") or "UNKNOWN"

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        state = self.get_state(job_id, mode=mode)
        return state == "GONE" or slurm.job_phase(state).is_over


class HetJob(SlurmJob[Any]):
    watcher = HetJobWatcher(delay_s=30)


class HetJobExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor for one typed HetJobSpec; `update_parameters` has nothing to say here."""

    job_class = HetJob

    def __init__(self, folder: Path, spec: HetJobSpec, python: str) -> None:
        super().__init__(folder, max_num_timeout=0, python=shlex.quote(python))
        self.spec = spec
        self.parameters["time"] = spec.time_min

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return render(self.spec, command)

    def _num_tasks(self) -> int:
        """Of the batch shell's callable, the supervisor; the stages are steps with results of their own."""
        return 1

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return sbatch_command(str(submission_file_path))

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[submitit.Job[Any]]:
        if len(delayed_submissions) != 1:
            raise ArrayRefusedError(f"{len(delayed_submissions)} submissions in one batch; submit one hetjob at a time")
        # Past SlurmExecutor's own version, which would build an array of plain SlurmExecutors.
        jobs: list[submitit.Job[Any]] = PicklingExecutor._internal_process_submissions(self, delayed_submissions)
        return jobs


def sbatch_command(*arguments: str) -> list[str]:
    """sbatch without the variables of an outer job (an inherited SLURM_HET_SIZE breaks every srun of the new job)."""
    unset = [word for name in sorted(os.environ) if is_foreign(name) for word in ("-u", name)]
    return ["env", *unset, "sbatch", *arguments]


class Submission(ABC):
    """A submitted run. `poll` is cheap enough for every second; `exit_code` is what the launcher should return."""

    mode: str

    def __init__(self, run: RunDir, job_id: str) -> None:
        self.run = run
        self.job_id = job_id

    def poll(self) -> tuple[str, str]:
        """("pending" | "running" | "succeeded" | "failed" | "unknown", reason). The supervisor's last word counts most."""
        return self._last_word() or self._ask()

    @property
    def exit_code(self) -> int:
        """0 after success, the first fatal cause's own code after a failure, 1 when there is none."""
        state = self.run.read(self.run.state_json) or {}
        if state.get("phase") == "succeeded":
            return 0
        return int((state.get("cause") or {}).get("exit_code") or 1)

    @abstractmethod
    def cancel(self) -> None:
        """Ask the supervisor to end the run; returns at once."""

    @abstractmethod
    def _ask(self) -> tuple[str, str]:
        """The state of a job whose supervisor has not said its last word."""

    def _last_word(self) -> tuple[str, str] | None:
        state = self.run.read(self.run.state_json) or {}
        if state.get("phase") == "succeeded":
            return "succeeded", ""
        if state.get("phase") == "failed":
            cause = state.get("cause") or {"step": "supervisor", "message": "no cause was recorded"}
            return "failed", f"{cause['step']}: {cause['message']}"
        return None

    def _sweep(self) -> None:
        """The steps died with their supervisor; on this host, end what had left its parents behind."""
        sweep(f"{self.run.run_id}.{self.run.attempt}.")

    def _supervisor_error(self) -> str:
        """Why a supervisor ended before it could record anything, from its log."""
        return exception_text(tail(self.run.logs / "supervisor.log", lines=200))


class SlurmSubmission(Submission):
    mode = "slurm"

    def __init__(self, run: RunDir, job: HetJob, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(run, str(job.job_id))
        self.job = job
        self._clock = clock
        self._answer: tuple[str, str] = ("pending", "")
        self._asked_s = float("-inf")
        self._pause_s = QUEUE_FIRST_S
        self._beat: tuple[int, float] = (-1, clock())

    def cancel(self) -> None:
        """TERM to the supervisor of a running job (it stops the steps in order); a pending job is just removed."""
        if self._ask_queue()[0] == "running":
            slurm.signal_batch(int(self.job_id), "TERM")
        else:
            slurm.cancel_job(int(self.job_id))

    def _ask(self) -> tuple[str, str]:
        """Asks Slurm at growing intervals (1 s to 10 s), and at once when the heartbeat stands still."""
        now_s = self._clock()
        waited_s, is_stalled = now_s - self._asked_s, self._is_stalled(now_s)
        if waited_s >= self._pause_s or (is_stalled and waited_s >= QUEUE_FIRST_S):
            self._asked_s, self._pause_s = now_s, min(self._pause_s * 1.5, QUEUE_LAST_S)
            self._answer = self._ask_queue()
        return self._answer

    def _is_stalled(self, now_s: float) -> bool:
        beat = int((self.run.read(self.run.state_json) or {}).get("heartbeat", -1))
        if beat != self._beat[0]:
            self._beat = (beat, now_s)
        return beat >= 0 and now_s - self._beat[1] > STALLED_S

    def _ask_queue(self) -> tuple[str, str]:
        try:
            components = slurm.query(int(self.job_id))
        except slurm.SlurmCommandError as error:
            return "unknown", str(error)
        if not components:
            return self._last_word() or (
                "failed",
                "Slurm does not know the job any more, and the supervisor left no last word",
            )
        folded = slurm.fold(components)
        if folded.phase.is_over:
            self._sweep()
            return self._last_word() or ("failed", f"supervisor: {self._supervisor_error() or folded.text}")
        reason = folded.reason if folded.phase is JobPhase.PENDING and folded.reason != "None" else ""
        return folded.phase.value, reason


class LocalSubmission(Submission):
    mode = "local"

    def __init__(self, run: RunDir, job: LocalPairJob) -> None:
        super().__init__(run, str(job.job_id))
        self.job = job

    def cancel(self) -> None:
        self.job.cancel()

    def _ask(self) -> tuple[str, str]:
        code = self.job.exit_status()
        if code is None or (code < 0 and self._supervisor_lives()):
            return "running", ""
        self._sweep()
        how = f"killed by {signal_name(abs(code) % 128)}" if code < 0 or code > 128 else f"exited {code}"
        words = self._supervisor_error()
        return self._last_word() or ("failed", f"supervisor: {how}{f': {words}' if words else ''}")

    def _supervisor_lives(self) -> bool:
        """A supervisor whose parent was killed stops its steps and says its last word first."""
        pid = int((self.run.read(self.run.state_json) or {}).get("pid", 0))
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return pid > 0


def choose_mode(config: LibraConfig) -> str:
    """ "slurm" or "local"; launch.mode=auto takes Slurm when sbatch is there and its controller answers."""
    if config.launch.mode != "auto":
        return config.launch.mode
    return "slurm" if has_slurm() else "local"


def submit(config: LibraConfig, plan: Plan, run: RunDir, *, entry: Entry = run_stage) -> Submission:
    """Write the desired state and start the run. Call it from the main thread.

    The run directory already holds config.yaml and plan.json. Raises SubmitError when Slurm refuses the job, and
    JobSpecError or PlacementError for a plan that cannot be laid out; nothing runs then.
    """
    check_path(run.root)
    write_desired(run, desired_steps(config, plan))
    if choose_mode(config) == "local":
        if not config.launch.follow:
            raise SubmitError(
                "launch.follow=false: a local run ends with its launcher; use launch.mode=slurm or launch.follow=true"
            )
        return _submit_local(config, run, entry)
    return _submit_slurm(config, plan, run, entry)


def reattach(run: RunDir, record: dict[str, Any]) -> Submission:
    """The job that an earlier launcher submitted, from its submission.json ("mode", "job_id").

    Raises SubmitError for a local run: it ended with its launcher.
    """
    if record["mode"] != "slurm":
        raise SubmitError(f"{run.root} was a local run; it ended with its launcher")
    return SlurmSubmission(run, HetJob(run.submitit, str(record["job_id"])))


def _submit_local(config: LibraConfig, run: RunDir, entry: Entry) -> Submission:
    executor = LocalPairExecutor(run.submitit, max_num_timeout=0, python=shlex.quote(config_python(config)))
    job = executor.submit(supervise, str(run.root), run.attempt, entry)
    return LocalSubmission(run, job)


def _submit_slurm(config: LibraConfig, plan: Plan, run: RunDir, entry: Entry) -> Submission:
    spec = job_spec(config, plan, run.root, run.attempt)
    write_bytes_atomic(run.job_sbatch, render_job(config, plan, run.root, run.attempt).encode())
    check_with_slurm(run.job_sbatch)
    executor = HetJobExecutor(run.submitit, spec, config_python(config))
    try:
        job = executor.submit(supervise, str(run.root), run.attempt, entry)
    except FailedJobError as error:
        raise SubmitError(f"sbatch refused {run.job_sbatch}: {error}") from error
    link_log(run.submitit, str(job.job_id))
    return SlurmSubmission(run, job)


def check_with_slurm(script: Path) -> None:
    """`sbatch --test-only`. It also refuses what a real submission would leave pending for ever (more nodes than there are).

    Raises SubmitError with Slurm's message.
    """
    try:
        slurm.command(sbatch_command("--test-only", str(script)), timeout_s=60.0)
    except slurm.SlurmCommandError as error:
        raise SubmitError(
            f"Slurm cannot run this job: {error}; see {script}, and change slurm.partition, slurm.time_min,"
            f" slurm.mem_per_node_bytes, hardware.cpus_per_node, hardware.gpus_per_node, train_gpus or rollout_gpus"
        ) from error
