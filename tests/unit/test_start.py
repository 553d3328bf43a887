"""What a task of a step runs: submitit's protocol, without the numpy that the stage may not need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from submitit.core.utils import DelayedSubmission, JobPaths, pickle_load


def what_is_loaded() -> dict[str, bool]:
    early = "numpy" in sys.modules
    import numpy as np

    return {"early": early, "usable": bool(np.zeros(1).sum() == 0)}


def test_a_step_starts_without_numpy_and_its_stage_can_have_it(tmp_path: Path) -> None:
    submission = DelayedSubmission(what_is_loaded)
    submission.set_timeout(1, 0)
    submission.dump(JobPaths(tmp_path, "7").submitted_pickle)
    task = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}

    subprocess.run(
        [sys.executable, "-u", "-m", "stages.start", str(tmp_path)],
        env={**os.environ, **task},
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=60,
        capture_output=True,
    )

    assert pickle_load(JobPaths(tmp_path, "7", 0).result_pickle) == ("success", {"early": False, "usable": True})


def test_a_numpy_that_is_loaded_already_stays(tmp_path: Path) -> None:
    code = "import numpy, sys; from stages.start import submitit_main; submitit_main(); assert sys.modules['numpy'] is numpy"

    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60, check=False)

    assert done.returncode == 0
