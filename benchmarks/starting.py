"""Stages that only say that they have started: what `benchmarks.launch` starts in place of trainer, controller and vLLM.

`python -m benchmarks.starting FOLDER NAME` says so without a run, with the same imports, for jobs without Libra.
`python -m benchmarks.starting --launch WORDS` is `python -m launch WORDS` with these stages; launcher and supervisor are real.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import submitit  # noqa: F401  (bare Python imports what Libra's steps import)

from stages.desired import end_run, read_desired
from stages.files import list_names
from stages.process import die_with_parent, install_stop_handlers
from stages.rundir import RunDir

STARTED = "started"
"""Folder of one file for each task, with the wall clock of its first line of code."""
GIVE_UP_S = 300.0
LOOK_S = 0.05


def say(folder: Path, name: str) -> None:
    """That this task of step `name` has started, and when."""
    (folder / f"{name}.{os.environ['SLURM_PROCID']}").write_text(repr(time.time()))


def entry(role: str, run_dir: str, attempt: int, name: str) -> dict[str, Any]:
    """In place of stages.entry.run_stage. The controller ends the run when every task has said that it started."""
    say(Path(run_dir) / STARTED, name)
    die_with_parent()
    stop = threading.Event()
    install_stop_handlers(stop)
    run = RunDir.open(Path(run_dir), writer=name, attempt=attempt)
    if role == "rollout":
        stop.wait(GIVE_UP_S)
    elif role == "controller":
        _end_when_all_have_started(run, stop)
    return {"started": True}


def _end_when_all_have_started(run: RunDir, stop: threading.Event) -> None:
    desired = read_desired(run)
    assert desired is not None
    tasks = sum(step.tasks for step in desired.steps)
    deadline = time.monotonic() + GIVE_UP_S
    while len(list_names(run.root / STARTED)) < tasks and time.monotonic() < deadline and not stop.wait(LOOK_S):
        pass
    end_run(run, "success", "every task has started")


def launch(words: list[str]) -> int:
    from launch import command_line, executors

    submit = executors.submit

    def submit_starting(config: Any, plan: Any, run: RunDir) -> Any:
        (run.root / STARTED).mkdir()
        return submit(config, plan, run, entry=entry)

    executors.submit = submit_starting  # type: ignore[assignment]
    return command_line.run(words)


if __name__ == "__main__":
    if sys.argv[1] == "--launch":
        # Pickled by reference: the steps import this module under its own name.
        from benchmarks import starting

        sys.exit(starting.launch(sys.argv[2:]))
    say(Path(sys.argv[1]), sys.argv[2])
