"""The callable that submitit pickles: one attempt of a run, in the batch shell of a Slurm job or in a local process."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import submitit

from conf.load import load
from conf.schema import LibraConfig
from launch.containers import surroundings
from launch.errors import RunFailedError
from launch.interruption import Interruption
from launch.journal import Journal
from launch.srun import Allocation, SrunRunner
from launch.steps import Entry, StepRunner
from launch.subprocesses import GpuPool, SubprocessRunner, visible_gpus
from launch.supervisor import Supervisor
from launch.verdict import Cause
from stages.desired import read_desired
from stages.entry import run_stage
from stages.process import PRIVATE_UMASK, die_with_parent
from stages.rollout.node_folder import remove_node_folder
from stages.rundir import RunDir


def supervise(run_dir: str, attempt: int, entry: Entry = run_stage) -> dict[str, Any]:
    """Run the attempt to its end. Raises RunFailedError after a failure; the process then exits with the stage's own code.

    By then state.json has the cause and no step runs. `entry` is the stage callable, replaced in tests only.
    """
    os.umask(PRIVATE_UMASK)
    place = submitit.JobEnvironment()
    interruption = Interruption()
    interruption.install()
    if place.cluster == "local":
        # TERM, not KILL: the launcher's death is recorded and the steps are stopped in order.
        die_with_parent(int(place.job_id), signal.SIGTERM)
    run = RunDir.open(Path(run_dir), writer="supervisor", attempt=attempt)
    config = load(run.config_yaml)
    journal = Journal(run, place.cluster, place.job_id)
    try:
        cause = Supervisor(
            run,
            make_runner(config, place.cluster),
            journal,
            interruption,
            job_id=place.job_id,
            entry=entry,
            timeout_min=config.slurm.time_min,
            failure_grace_s=config.launch.stop_grace_s,
        ).run()
    finally:
        remove_node_folder(run.run_id)
        journal.close()
        signal.alarm(0)
    if cause is not None:
        sys.excepthook = exit_with_own_code
        raise RunFailedError(describe(cause), cause.exit_code)
    desired = read_desired(run)
    return {"outcome": "success", "reason": desired.reason if desired else ""}


def make_runner(config: LibraConfig, cluster: str) -> StepRunner:
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
