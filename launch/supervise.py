"""The callable that submitit pickles: one attempt of a run, in the batch shell of a Slurm job or in a local process."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import submitit

from conf.load import load
from conf.schema import LibraConfig
from launch.attempts import begin, cancelled_before, history, next_refusal, refusal
from launch.batch_job import BatchJob
from launch.chain import Chained, chain
from launch.containers import surroundings
from launch.errors import RunFailedError
from launch.exclusions import excluded_nodes
from launch.fleet import Fleet
from launch.interruption import Interruption
from launch.job import Job
from launch.job_environment import AllocationError, JobEnvironment
from launch.journal import Journal
from launch.srun import Allocation, SrunRunner
from launch.steps import Entry, StepRunner
from launch.stops import Requeued
from launch.subprocesses import GpuPool, SubprocessRunner, visible_gpus
from launch.supervisor import Limits, Supervisor
from launch.verdict import Cause
from stages.desired import read_desired
from stages.entry import run_stage
from stages.process import PRIVATE_UMASK, die_with_parent
from stages.rollout.node_folder import remove_node_folder, sweep_node_folders
from stages.rundir import RunDir


def supervise(run_dir: str, attempt: int, entry: Entry = run_stage, reason: str = "first") -> dict[str, Any]:
    """Run one attempt to its end. Raises RunFailedError after a failure; the process then exits with the stage's own code.

    By then state.json has the cause and no step runs. `attempt` is the one that the job was submitted for, for `reason`;
    when Slurm runs the job again, each run is one attempt further. `entry` is the stage callable, replaced in tests only.
    """
    os.umask(PRIVATE_UMASK)
    place = submitit.JobEnvironment()
    interruption = Interruption()
    interruption.install()
    if place.cluster == "local":
        # TERM, not KILL: the launcher's death is recorded and the steps are stopped in order.
        die_with_parent(int(place.job_id), signal.SIGTERM)
    sweep_node_folders()
    base = RunDir.open(Path(run_dir), writer="supervisor", attempt=attempt)
    config = load(base.config_yaml)
    restarts = JobEnvironment(os.environ).restarts if place.cluster == "slurm" else 0
    run = begin(base, config, mode=place.cluster, job_id=place.job_id, restarts=restarts, reason=reason)
    journal = Journal(run, place.cluster, place.job_id)
    try:
        job = make_job(run, config, place, restarts, entry)
        ending = _not_again(run, config, journal) or _supervised(run, config, place, journal, interruption, job, entry)
    finally:
        remove_node_folder(run.run_id)
        journal.close()
        signal.alarm(0)
    if isinstance(ending, Requeued):
        return {"outcome": "requeued", **asdict(ending)}
    if ending is not None:
        sys.excepthook = exit_with_own_code
        raise RunFailedError(describe(ending), ending.exit_code)
    desired = read_desired(run)
    return {"outcome": "success", "reason": desired.reason if desired else ""}


def _supervised(
    run: RunDir,
    config: LibraConfig,
    place: submitit.JobEnvironment,
    journal: Journal,
    interruption: Interruption,
    job: Job,
    entry: Entry,
) -> Cause | Requeued | None:
    try:
        runner = make_runner(config, place.cluster)
    except AllocationError as error:
        return _failed(journal, Cause("supervisor", "environment", str(error)))
    fleet = Fleet(
        run,
        runner,
        journal,
        job_id=place.job_id,
        entry=entry,
        timeout_min=config.slurm.time_min,
    )
    limits = Limits(
        failure_grace_s=config.launch.stop_grace_s,
        min_instances=config.rollout.min_instances,
        heartbeat_timeout_s=config.rollout.heartbeat_timeout_s,
    )
    return Supervisor(run, fleet, journal, interruption, job, limits, refusal=lambda: next_refusal(run, config)).run()


def _not_again(run: RunDir, config: LibraConfig, journal: Journal) -> Cause | None:
    """Slurm starts a job again as often as its nodes fail; that must have an end where nothing comes of it, or people want one."""
    request = cancelled_before(run)
    if request is not None:
        return _failed(journal, Cause("supervisor", "cancelled", f"{request.reason} before this attempt started", 143))
    why = refusal(history(run), config.launch.max_restarts, config.launch.max_restarts_without_progress)
    return _failed(journal, Cause("supervisor", "restarts", why)) if why else None


def _failed(journal: Journal, cause: Cause) -> Cause:
    """Before any step was started."""
    journal.fatal(cause)
    journal.phase("failed")
    return cause


def make_job(run: RunDir, config: LibraConfig, place: submitit.JobEnvironment, restarts: int, entry: Entry) -> Job:
    if place.cluster != "slurm":
        return Job(place.job_id)

    def chained() -> Chained:
        in_shell = (run.read(run.submission_json) or {}).get("mode") == "allocation"
        return chain(run, config, place.job_id, supervise, entry, sorted(excluded_nodes(run)), is_held=in_shell)

    def excluded() -> list[str]:
        """One list for all components of the job that is run again; empty when nothing has to be added."""
        found, slurm = sorted(excluded_nodes(run)), config.slurm
        return [*filter(None, [slurm.exclude, slurm.trainer.exclude, slurm.rollout.exclude]), *found] if found else []

    return BatchJob(run, place.job_id, restarts, config.slurm.requeue, chained, excluded)


def make_runner(config: LibraConfig, cluster: str) -> StepRunner:
    """Raises AllocationError."""
    python, around = config.launch.python or sys.executable, surroundings(config)
    if cluster == "slurm":
        return SrunRunner(python, Allocation.from_environment(os.environ), around)
    gpus = GpuPool(visible_gpus(os.environ)) if config.hardware.device == "cuda" else None
    return SubprocessRunner(python, gpus, around)


def describe(cause: Cause) -> str:
    """The message of the failed job: the cause, then the end of the log."""
    lines = [str(cause)]
    if cause.log_tail:
        lines += [f"last lines of {cause.step}'s log:", *(f"  | {line}" for line in cause.log_tail.splitlines())]
    return "\n".join(lines)


def exit_with_own_code(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook after a failed run: Slurm shows the failed stage's exit code instead of Python's 1.

    submitit has written its error pickle by the time an exception gets here; `sys.exit(code)` inside the callable would have
    skipped that (facts: it leaves no result pickle).
    """
    if not isinstance(error, RunFailedError):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"the run failed: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(error.exit_code)
