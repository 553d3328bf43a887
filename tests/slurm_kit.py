"""Runs with fake stages as real jobs on the private Slurm, and what tests ask about them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.schema import LibraConfig
from launch import slurm
from launch.executors import submit
from launch.submission import SlurmSubmission
from planner.plan import Plan
from stages.rundir import RunDir
from tests.fake_runs import await_ready, fake_config, fake_plan, fake_run, processes_of, until
from tests.fake_stages import entry
from tests.leftovers import Belongings

TASKS = ["trainer.0", "trainer.1", "controller.0", "rollout_000.0", "rollout_001.0"]
SERVING = {"trainer": {"do": "serve"}}
WORKING = {"trainer": {"do": "work"}}
TRAINING = {"trainer": {"do": "train"}}
LIMIT_S = 15.0
"""From a death to the end of everything."""
AGAIN_S = 90.0
"""A requeued job waits for about half a minute before Slurm starts it again (`launch.devcluster.render`)."""
LAST_WORDS = ("succeeded", "failed", "requeued")

Start = Callable[..., "SlurmRun"]


def slurm_config() -> LibraConfig:
    """Two nodes of the development cluster."""
    config = fake_config("slurm")
    config.hardware.gpus_per_node = 2
    config.slurm.partition = "dev"
    config.slurm.mem_per_node_bytes = 2e9
    config.slurm.time_min = 10
    return config


class SlurmRun:
    """Submitted, and all of its steps up."""

    def __init__(self, root: Path, plan: Plan, behaviours: dict[str, dict[str, Any]], config: LibraConfig) -> None:
        self.config = config
        self.run = fake_run(root, self.config, plan, behaviours)
        submission = submit(self.config, plan, self.run, entry=entry)
        assert isinstance(submission, SlurmSubmission)
        self.submission = submission
        self.job_id = int(submission.job_id)
        self.tasks = ["trainer.0", "controller.0", *(f"{one.name}.0" for one in plan.rollout.instances)]
        self.tasks += [f"trainer.{rank}" for rank in range(1, plan.train.gpus)]
        self.pids = await_ready(self.run, self.tasks)
        self.held = Belongings.of(self.run)
        instances = [name for name in self.tasks if name.startswith("rollout")]
        assert len(self.held.shared) == len(instances) <= len(self.held.ports), "what may be left was seen to be there"

    def end(self) -> tuple[str, str]:
        """The run's last word, once its job is over and no process of it is left."""
        until(lambda: self.submission.poll()[0] in ("succeeded", "failed"), LIMIT_S, "the end of the run")
        word = self.submission.poll()
        until(lambda: slurm.fold(slurm.query(self.job_id)).phase.is_over, LIMIT_S, "the end of the job")
        until(lambda: not processes_of(self.run), LIMIT_S, "the end of all processes")
        return word

    def slurms_verdict(self) -> list[tuple[str, str]]:
        """(state, exit code) of each component."""
        return [(part.state, part.exit_code) for part in slurm.query(self.job_id)]

    # ---- attempts -----------------------------------------------------------------------------------------------

    def at(self, attempt: int) -> RunDir:
        return RunDir(self.run.root, self.run.run_id, attempt, "test")

    def state_of(self, attempt: int) -> dict[str, Any]:
        run = self.at(attempt)
        return run.read(run.state_json) or {}

    def last_word(self, attempt: int = 0, deadline_s: float = LIMIT_S) -> dict[str, Any]:
        """state.json of an attempt that has said its last word."""
        until(lambda: self.state_of(attempt).get("phase") in LAST_WORDS, deadline_s, f"the end of attempt {attempt}")
        return self.state_of(attempt)

    def record(self, attempt: int) -> dict[str, Any]:
        run = self.at(attempt)
        return run.read(run.attempt_json) or {}

    def events(self, what: str, attempt: int = 0) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.at(attempt).events_jsonl.read_text().splitlines()]
        return [line for line in lines if line["event"] == what]

    def await_attempt(self, attempt: int, deadline_s: float = AGAIN_S) -> dict[str, int]:
        """Wait until all tasks of a later attempt are up; returns their pids."""
        until(lambda: self.state_of(attempt).get("phase") == "running", deadline_s, f"attempt {attempt}")
        started = self.run.root / "ready"
        fresh = {name: self.pids[name] for name in self.tasks}
        until(
            lambda: all(int((started / name).read_text()) != fresh[name] for name in self.tasks),
            LIMIT_S * 2,
            f"all tasks of attempt {attempt}",
        )
        self.pids = await_ready(self.run, self.tasks)
        self.held.note()
        return self.pids

    def next_pid(self, task: str) -> int:
        """The pid of a task that was started again."""
        ready = self.run.root / "ready" / task
        return until(lambda: (pid := int(ready.read_text())) != self.pids[task] and pid, 30.0, f"another {task}")

    def started_from(self, attempt: int) -> int:
        """The step from which the fake trainer of an attempt went on."""
        return int((self.run.root / "ready" / f"from.{attempt}").read_text())


@contextmanager
def slurm_runs(folder: Path, slurm_conf: Path) -> Iterator[Start]:
    """Starts runs; at the end every one is ended, and nothing of it may be left.

    The run directory has a blank in its name: script, commands and log names must be quoted right.
    """
    made: list[SlurmRun] = []

    def start(
        behaviours: dict[str, dict[str, Any]] | None = None,
        plan: Plan | None = None,
        config: LibraConfig | None = None,
    ) -> SlurmRun:
        plan = plan or fake_plan("hetjob", train_gpus=2)
        made.append(SlurmRun(folder / f"first light {len(made)}", plan, behaviours or {}, config or slurm_config()))
        return made[-1]

    try:
        yield start
    finally:
        set_nodes("RESUME")
        for job in jobs():
            slurm.cancel_job(job)
        await_no_jobs()
    for run in made:
        run.held.assert_gone(slurm_conf)


def await_no_jobs(deadline_s: float = 30.0) -> None:
    """Fails the test with what Slurm shows of the jobs, their steps and the nodes when one does not end."""
    try:
        until(lambda: not jobs(), deadline_s, "the end of the cancelled jobs")
    except AssertionError as late:
        asked = (["squeue"], ["squeue", "-s"], ["sinfo", "-N", "-l"])
        raise AssertionError("\n".join([str(late), *(slurm.command(words) for words in asked)])) from None


def jobs() -> list[int]:
    """Ids of the leaders of all jobs that are not over."""
    listed = slurm.command(["squeue", "-h", "-o", "%i"]).split()
    return sorted({int(name.partition("+")[0]) for name in listed})


def set_nodes(state: str, *names: str) -> None:
    """Set nodes down, or bring all that are down back."""
    if not names:
        lines = slurm.command(["sinfo", "-h", "-N", "-o", "%N %T"]).splitlines()
        names = tuple(line.split()[0] for line in lines if "down" in line or "drain" in line)
    for name in names:
        reason = ["Reason=drill"] if state == "DOWN" else []
        subprocess.run(["scontrol", "update", f"NodeName={name}", f"State={state}", *reason], check=True, timeout=30)
