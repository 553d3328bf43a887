"""The job that comes after this one, where a job cannot be requeued: `sbatch --dependency=afterany:J` of the same run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths

from conf.schema import LibraConfig
from launch import slurm
from launch.attempts import read_plan
from launch.hetjob import render_job
from launch.local import link_log
from launch.steps import Entry
from stages.files import make_directory, remove_tree, write_bytes_atomic
from stages.rundir import RunDir

SUBMIT_TIMEOUT_S = 60.0
RELEASE_TIMEOUT_S = 60.0

Supervise = Callable[[str, int, Entry, str], dict[str, Any]]


@dataclass(frozen=True)
class Chained:
    """A job that waits for the end of this one. Its attempt's folder has yet to get its name.

    `is_held`: it waits for `start_attempt` too, as this job may be over before.
    """

    job_id: str
    folder: Path
    attempt_dir: Path
    is_held: bool = False

    def start_attempt(self) -> None:
        """From now on this attempt is fenced out; its last word must have been said. Raises SlurmCommandError."""
        os.rename(self.folder, self.attempt_dir)
        if self.is_held:
            slurm.command(["scontrol", "release", self.job_id], RELEASE_TIMEOUT_S)


def chain(
    run: RunDir,
    config: LibraConfig,
    job_id: str,
    supervise: Supervise,
    entry: Entry,
    excluded: Sequence[str],
    *,
    is_held: bool = False,
) -> Chained:
    """Submit the job of the next attempt, to start when job `job_id` is over. Raises SlurmCommandError; nothing is left then.

    `is_held`: not before `start_attempt` either. In salloc the supervisor outlives an allocation that lost a node, and a job that
    starts at once does not find the folder of its log (tried: it fails, and the run goes on nowhere).
    """
    later = replace(run, attempt=run.attempt + 1)
    folder = run.root / "attempts" / f".next-{secrets.token_hex(4)}"
    for name in ("logs", "submitit", "traces", "reads"):
        make_directory(folder / name)
    pickle = folder / "submitit" / "submission.pkl"
    submission = DelayedSubmission(supervise, str(run.root), later.attempt, entry, "chain")
    submission.set_timeout(config.slurm.time_min, 0)
    submission.dump(pickle)
    script = render_job(config, read_plan(run), run.root, later.attempt, excluded)
    write_bytes_atomic(run.job_sbatch, script.encode())
    try:
        next_id = _sbatch(run.job_sbatch, job_id, is_held=is_held)
    except slurm.SlurmCommandError:
        remove_tree(folder)
        raise
    os.replace(pickle, JobPaths(folder / "submitit", next_id).submitted_pickle)
    link_log(folder / "submitit", next_id)
    later.write(folder / later.submission_json.name, {"mode": "slurm", "job_id": next_id})
    return Chained(next_id, folder, later.attempt_dir, is_held)


def _sbatch(script: Path, after: str, *, is_held: bool) -> str:
    """The new job's id; in a federation sbatch prints "id;cluster"."""
    hold = ["--hold"] if is_held else []
    words = ["sbatch", "--parsable", *hold, f"--dependency=afterany:{after}", str(script)]
    return slurm.command(words, timeout_s=SUBMIT_TIMEOUT_S).strip().partition(";")[0]
