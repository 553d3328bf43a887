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

Supervise = Callable[[str, int, Entry, str], dict[str, Any]]


@dataclass(frozen=True)
class Chained:
    """A job that waits for the end of this one. Its attempt's folder has yet to get its name."""

    job_id: str
    folder: Path
    attempt_dir: Path

    def start_attempt(self) -> None:
        """From now on this attempt is fenced out; its last word must have been said."""
        os.rename(self.folder, self.attempt_dir)


def chain(
    run: RunDir, config: LibraConfig, job_id: str, supervise: Supervise, entry: Entry, excluded: Sequence[str]
) -> Chained:
    """Submit the job of the next attempt, to start when job `job_id` is over. Raises SlurmCommandError; nothing is left then."""
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
        next_id = _sbatch(run.job_sbatch, job_id)
    except slurm.SlurmCommandError:
        remove_tree(folder)
        raise
    os.replace(pickle, JobPaths(folder / "submitit", next_id).submitted_pickle)
    link_log(folder / "submitit", next_id)
    later.write(folder / later.submission_json.name, {"mode": "slurm", "job_id": next_id})
    return Chained(next_id, folder, later.attempt_dir)


def _sbatch(script: Path, after: str) -> str:
    """The new job's id; in a federation sbatch prints "id;cluster"."""
    words = ["sbatch", "--parsable", f"--dependency=afterany:{after}", str(script)]
    return slurm.command(words, timeout_s=SUBMIT_TIMEOUT_S).strip().partition(";")[0]
