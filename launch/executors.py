"""Submitting a run: a heterogeneous Slurm job, or its local pair. The supervisor is the same callable in both."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import Any

import submitit
from submitit.core.core import InfoWatcher, PicklingExecutor
from submitit.core.utils import DelayedSubmission, FailedJobError
from submitit.slurm.slurm import SlurmJob

from conf.schema import LibraConfig
from launch import allocation, preflight, slurm
from launch.allocation import NOT_INSIDE
from launch.containers import outer_python
from launch.desired_steps import desired_steps
from launch.exclusions import excluded_nodes
from launch.held_signals import held_signals
from launch.hetjob import HetJobSpec, check_path, job_spec, render, render_job
from launch.inside import submit_inside
from launch.job_environment import AllocationError
from launch.local import LocalPairExecutor, link_log
from launch.machine import choose_mode
from launch.partitions import SubmitError
from launch.preflight import sbatch_command
from launch.steps import Entry
from launch.submission import LocalSubmission, SlurmSubmission, Submission
from launch.supervise import supervise
from planner.plan import Plan
from stages.desired import write_desired
from stages.entry import run_stage
from stages.files import write_bytes_atomic
from stages.process import private_files
from stages.rundir import RunDir

__all__ = ["ArrayRefusedError", "HetJob", "HetJobExecutor", "HetJobWatcher", "SubmitError", "reattach", "submit"]


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
        """In a session of its own: Ctrl-C in a terminal must not end an sbatch whose job Slurm may have taken already."""
        return ["setsid", *sbatch_command(str(submission_file_path))]

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[submitit.Job[Any]]:
        if len(delayed_submissions) != 1:
            raise ArrayRefusedError(f"{len(delayed_submissions)} submissions in one batch; submit one hetjob at a time")
        # Past SlurmExecutor's own version, which would build an array of plain SlurmExecutors.
        jobs: list[submitit.Job[Any]] = PicklingExecutor._internal_process_submissions(self, delayed_submissions)
        return jobs


def submit(config: LibraConfig, plan: Plan, run: RunDir, *, entry: Entry = run_stage) -> Submission:
    """Write the desired state and start the run. Call it from the main thread.

    The run directory already holds config.yaml and plan.json. Raises SubmitError when Slurm refuses the job, and
    JobSpecError or PlacementError for a plan that cannot be laid out; nothing runs then.
    """
    check_path(run.root)
    write_desired(run, desired_steps(config, plan))
    mode = choose_mode(config.launch.mode)
    if mode == "allocation":
        with private_files():
            return _submit_inside(config, run, entry)
    if mode == "local":
        if not config.launch.follow:
            raise SubmitError(
                "launch.follow=false: a local run ends with its launcher; use launch.mode=slurm or launch.follow=true"
            )
        with private_files():
            return _submit_local(config, run, entry)
    with private_files():
        return _submit_slurm(config, plan, run, entry)


def reattach(run: RunDir, record: dict[str, Any]) -> Submission:
    """The job that an earlier launcher submitted, from its submission.json ("mode", "job_id").

    Raises SubmitError for a local run: it ended with its launcher.
    """
    if record["mode"] != "slurm":
        raise SubmitError(f"{run.root} was a local run; it ended with its launcher")
    return SlurmSubmission(run, HetJob(run.submitit, str(record["job_id"])))


def _submit_inside(config: LibraConfig, run: RunDir, entry: Entry) -> Submission:
    try:
        if not allocation.is_inside(os.environ):
            raise SubmitError(NOT_INSIDE)
        where = allocation.held(os.environ)
    except AllocationError as error:
        raise SubmitError(str(error)) from error
    return submit_inside(run, outer_python(config), config.slurm.time_min, where, entry)


def _submit_local(config: LibraConfig, run: RunDir, entry: Entry) -> Submission:
    executor = LocalPairExecutor(run.submitit, max_num_timeout=0, python=shlex.quote(outer_python(config)))
    job = executor.submit(supervise, str(run.root), run.attempt, entry)
    return LocalSubmission(run, job)


def _submit_slurm(config: LibraConfig, plan: Plan, run: RunDir, entry: Entry) -> Submission:
    exclude = sorted(excluded_nodes(run))
    spec = job_spec(config, plan, run.root, run.attempt, exclude)
    write_bytes_atomic(run.job_sbatch, render_job(config, plan, run.root, run.attempt, exclude).encode())
    for sentence in preflight.check(spec, run.job_sbatch):
        print(sentence, flush=True)
    executor = HetJobExecutor(run.submitit, spec, outer_python(config))
    try:
        with held_signals():
            job = executor.submit(supervise, str(run.root), run.attempt, entry)
            _write_down(run, str(job.job_id))
    except FailedJobError as error:
        raise SubmitError(f"sbatch refused the job: {error}; launch.dry_run=true shows the script") from error
    link_log(run.submitit, str(job.job_id))
    return SlurmSubmission(run, job)


def _write_down(run: RunDir, job_id: str) -> None:
    """Raises SubmitError when that cannot be: a job that nobody would find again is taken back."""
    try:
        run.write(run.submission_json, {"mode": "slurm", "job_id": job_id})
    except OSError as error:
        slurm.cancel_job(int(job_id))
        raise SubmitError(f"job {job_id} was cancelled, as its number could not be written down: {error}") from error
