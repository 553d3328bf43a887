"""Whole local runs with fake stages: launcher -> submitit's controller -> supervisor -> steps, with real processes and signals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.schema import LibraConfig
from launch.executors import submit
from launch.submission import LocalSubmission
from launch.sweep import sweep
from stages.rundir import RunDir
from tests.fake_runs import await_ready, fake_config, fake_plan, fake_run, processes_of, until
from tests.fake_stages import entry

TASKS = ["trainer.0", "trainer.1", "controller.0", "rollout_000.0", "rollout_001.0"]
SERVING = {"trainer": {"do": "serve"}}
LIMIT_S = 15.0
"""From a death to the end of everything (issue: 15 s; grace here is 2 s)."""

Start = Callable[..., "LocalRun"]


class LocalRun:
    def __init__(self, root: Path, behaviours: dict[str, dict[str, Any]], config: LibraConfig) -> None:
        self.config, self.plan = config, fake_plan(train_gpus=2)
        self.run: RunDir = fake_run(root, self.config, self.plan, behaviours)
        submitted = submit(self.config, self.plan, self.run, entry=entry)
        assert isinstance(submitted, LocalSubmission)
        self.submission = submitted
        self.pids = await_ready(self.run, TASKS)

    def end(self) -> tuple[str, str]:
        """The run's last word, once no process of it is left."""
        until(lambda: self.submission.poll()[0] in ("succeeded", "failed"), LIMIT_S, "the end of the run")
        word = self.submission.poll()
        until(lambda: not processes_of(self.run), LIMIT_S, "the end of all processes")
        until(lambda: self.submission.job.exit_status() is not None, LIMIT_S, "the end of submitit's controller")
        return word

    def events(self, what: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.run.events_jsonl.read_text().splitlines()]
        return [line for line in lines if line["event"] == what]

    def next_pid(self, task: str) -> int:
        """The pid of a task that was started again."""
        ready = self.run.root / "ready" / task
        return until(lambda: (pid := int(ready.read_text())) != self.pids[task] and pid, 30.0, f"another {task}")


@contextmanager
def local_runs(folder: Path) -> Iterator[Start]:
    """Starts runs; whatever a test leaves of one is ended."""
    made: list[LocalRun] = []

    def start(behaviours: dict[str, dict[str, Any]] | None = None, config: LibraConfig | None = None) -> LocalRun:
        made.append(LocalRun(folder / "run", behaviours or {}, config or fake_config()))
        return made[-1]

    yield start
    for run in made:
        run.submission.cancel()
        until(lambda run=run: run.submission.job.exit_status() is not None, 30.0, "the end of a cancelled run")  # type: ignore[misc]
        sweep(f"{run.run.run_id}.")
