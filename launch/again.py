"""A batch script that Slurm runs again (requeue, a lost node): the same command line goes on with the run that it had started.

Slurm runs a job of our own again by running its script, which is the supervisor; a script of a user runs `python -m launch` again.
SLURM_RESTART_COUNT tells that it is not the first time, and the run directory that it is the same run.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from launch.allocation import held, is_inside, run_of_this_job
from launch.containers import outer_python
from launch.errors import LibraError
from launch.inside import start_inside
from launch.prepare import Prepared
from launch.submission import Submission
from stages.rundir import RunDir

Stay = Callable[[RunDir, Submission, Prepared], None]


def go_on(prepared: Prepared, stay: Stay) -> bool:
    """Start the supervisor again and stay to the end; False when there is nothing to go on with. Raises LibraError kinds."""
    if prepared.config.launch.mode != "allocation" or not is_inside(os.environ):
        return False
    where = held(os.environ)
    run = run_of_this_job(prepared.run_dir, where.job_id, where.restarts)
    if run is None:
        return False
    newest = RunDir.open(run.root, writer="launcher")
    if (newest.read(newest.state_json) or {}).get("phase") == "succeeded":
        print(f"{run.root} has ended well already; nothing is left to do", flush=True)
        return True
    if newest.attempt >= run.attempt + where.restarts:
        raise LibraError(
            f"{run.root} has got attempt {newest.attempt} from somebody else; job {where.job_id} does not go on with it"
        )
    print(f"{run.root}: job {where.job_id} runs again, attempt {run.attempt + where.restarts}", flush=True)
    submission = start_inside(run, outer_python(prepared.config), where)
    stay(newest, submission, prepared)
    return True
