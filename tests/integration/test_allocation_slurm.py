"""Runs inside jobs that somebody else asked for: the wrappers, a batch script that Slurm runs again, and salloc.

Stages are fakes; launcher, supervisor, srun and sbatch are real.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conf.load import load
from conf.schema import LibraConfig
from launch import slurm
from stages.rundir import RunDir
from tests.fake_launch import make_model
from tests.fake_runs import await_ready, go, processes_of, state, until
from tests.leftovers import Belongings
from tests.slurm_kit import await_no_jobs, jobs, set_nodes

pytestmark = pytest.mark.slurm

NAME = "grpo, first [try]"
"""A job may have a name that means something to Hydra; the run directory is called after it."""
WRAPPERS = Path(__file__).parents[2] / "launch" / "wrappers"
NODE = ("--cpus-per-task=4", "--mem=1000M")
"""What a node of the development cluster has."""
SHARED = ["trainer.0", "trainer.1", "controller.0", "rollout_000.0", "rollout_001.0"]
RUNNING = {"trainer": {"do": "work"}}
LIMIT_S = 20.0
START_S = 90.0


class WrapperJob:
    """A wrapper submitted with sbatch from `folder`; `run` once its launcher has made the run directory."""

    def __init__(
        self, folder: Path, wrapper: str, options: Sequence[str], words: Sequence[str], fakes: dict[str, Any]
    ) -> None:
        python = folder / "python"
        python.write_text(f'#!/bin/bash\nshift 3\nexec "{sys.executable}" -u -m tests.fake_launch "$@"\n')
        python.chmod(0o700)
        environment = {**os.environ, "LIBRA_PYTHON": str(python), "FAKE_BEHAVIOURS": json.dumps(fakes)}
        command = ["sbatch", "--parsable", f"--job-name={NAME}", *options, str(WRAPPERS / wrapper), *words]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        self.job_id = int(done.stdout)
        self.log_file = folder / f"libra-{self.job_id}.log"
        self.root = folder / "runs" / f"{NAME}-{self.job_id}"
        self.held: Belongings | None = None

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def run(self) -> RunDir:
        return RunDir.open(self.root, writer="test")

    def config(self) -> LibraConfig:
        return load(self.root / "config.yaml")

    def ready(self, tasks: Sequence[str]) -> dict[str, int]:
        until(lambda: (self.root / "fake.json").exists(), START_S, f"a run directory of job {self.job_id}:\n{self.log}")
        pids = await_ready(self.run, tasks, START_S)
        self.held = Belongings.of(self.run)
        return pids

    def verdict(self) -> tuple[str, str]:
        """(state, exit code) of the job once it is over, and nothing of its run is left."""
        until(
            lambda: slurm.fold(slurm.query(self.job_id)).phase.is_over,
            60.0,
            f"the end of job {self.job_id}:\n{self.log}",
        )
        until(lambda: not processes_of(self.run), LIMIT_S, "the end of all processes")
        leader = slurm.query(self.job_id)[0]
        return leader.state, leader.exit_code


Start = Callable[..., WrapperJob]


@pytest.fixture
def start(tmp_path: Path, slurm_conf: Path) -> Iterator[Start]:
    """The folder has a blank in its name."""
    folder = tmp_path / "first light"
    folder.mkdir()
    model = make_model(tmp_path / "model")
    made: list[WrapperJob] = []

    def starter(
        wrapper: str = "libra.sbatch",
        options: Sequence[str] = ("--nodes=2", *NODE),
        words: Sequence[str] = (),
        fakes: dict[str, Any] | None = None,
    ) -> WrapperJob:
        made.append(WrapperJob(folder, wrapper, options, [*model, *words], fakes or {}))
        return made[-1]

    yield starter
    for job in made:
        slurm.cancel_job(job.job_id)
        until(lambda job=job: slurm.fold(slurm.query(job.job_id)).phase.is_over, 30.0, "the cancelled job")  # type: ignore[misc]
        if job.held is not None:
            job.held.assert_gone(slurm_conf)


def test_a_run_takes_the_nodes_of_the_job_that_the_wrapper_asked_for(start: Start) -> None:
    job = start(fakes=RUNNING)
    job.ready(SHARED)
    steps = slurm.step_ids([job.job_id])
    go(job.run)

    assert job.verdict() == ("COMPLETED", "0:0"), job.log
    assert {"trainer.0", "controller.0", "rollout_000.0", "rollout_001.0"} <= set(steps)
    assert (job.config().train_gpus, job.config().rollout_gpus, job.config().slurm.layout) == (2, 2, "single")
    assert "train_gpus: 2  # allocation" in (job.root / "config.yaml").read_text()
    assert f"this run takes job {job.job_id}: 2 node(s) with 2 GPUs and 4 processors: train_gpus 1 -> 2" in job.log


def test_a_heterogeneous_wrapper_gives_each_side_its_component(start: Start) -> None:
    options = ["--nodes=1", *NODE, ":", "--nodes=2", *NODE]
    job = start("libra-hetjob.sbatch", options, fakes=RUNNING)
    job.ready([*SHARED, "rollout_002.0", "rollout_003.0"])
    steps = slurm.step_ids([job.job_id, job.job_id + 1])
    go(job.run)

    assert job.verdict() == ("COMPLETED", "0:0"), job.log
    assert steps["trainer.0"].startswith(f"{job.job_id}.")
    assert all(steps[f"rollout_00{index}.0"].startswith(f"{job.job_id + 1}.") for index in range(4))
    assert (job.config().train_gpus, job.config().rollout_gpus) == (2, 4)
    assert job.config().slurm.rollout_component_nodes == [2]


def test_what_the_command_line_asks_for_beyond_the_job_is_refused(start: Start) -> None:
    job = start(options=["--nodes=1", *NODE], words=["train_gpus=2", "rollout_gpus=2"])
    until(lambda: slurm.fold(slurm.query(job.job_id)).phase.is_over, START_S, "the end of the job")

    assert slurm.query(job.job_id)[0].exit_code == "2:0"
    assert f"train_gpus=2 and rollout_gpus=2 cannot be had from job {job.job_id}: 1 node(s) with 2 GPUs" in job.log
    assert not job.root.exists()


def test_the_job_ends_with_the_exit_code_and_the_words_of_the_stage(start: Start) -> None:
    job = start(fakes={"controller": {"do": "leave", "code": 7}, "trainer": {"do": "serve"}})
    job.ready(SHARED)
    go(job.run)

    assert job.verdict() == ("FAILED", "7:0")
    assert "the run failed: controller: exited 7" in job.log


def test_a_cancelled_job_stops_its_run_in_order(start: Start) -> None:
    job = start(fakes=RUNNING)
    job.ready(SHARED)

    slurm.cancel_job(job.job_id)

    assert job.verdict()[0] == "CANCELLED"
    assert state(job.run)["phase"] == "failed"
    assert "cancelled" in state(job.run)["cause"]["message"]


def test_a_job_whose_limit_is_near_goes_on_with_its_own_run_when_slurm_runs_it_again(start: Start) -> None:
    job = start(fakes={"trainer": {"do": "train"}})
    job.ready(SHARED)

    slurm.signal_batch(job.job_id, "USR1")
    until(
        lambda: job.run.attempt == 1 and state(job.run).get("phase") == "running",
        180.0,
        f"the next attempt:\n{job.log}",
    )
    until(lambda: "from.1" in os.listdir(job.root / "ready"), 60.0, "the trainer of the next attempt")
    go(job.run)

    assert job.verdict() == ("COMPLETED", "0:0"), job.log
    assert int((job.root / "ready" / "from.1").read_text()) > 0, "the trainer went on from the checkpoint"
    assert f"job {job.job_id} runs again, attempt 1" in job.log
    assert len(list(job.root.parent.iterdir())) == 1, "one run directory"


def test_a_script_that_names_no_run_goes_on_with_its_own_when_slurm_runs_it_again_after_a_lost_node(
    tmp_path: Path, slurm_conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOURS", json.dumps({"trainer": {"do": "train"}}))
    words = [sys.executable, "-u", "-m", "tests.fake_launch", *make_model(tmp_path / "model")]
    script = tmp_path / "mine.sbatch"
    script.write_text(f"#!/bin/bash\nexport PYTHONPATH={Path.cwd()}\nexec {shlex.join(words)}\n")
    options = ["--requeue", "--nodes=2", "--gpus-per-node=2", *NODE]
    said = subprocess.run(
        ["sbatch", "--parsable", *options, str(script)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    job_id = int(said.stdout)
    runs = tmp_path / "runs"
    try:
        until(lambda: list(runs.glob("*/fake.json")), START_S, "a run directory")
        run = RunDir.open(next(runs.iterdir()), writer="test")
        await_ready(run, SHARED, START_S)
        held = Belongings.of(run)
        (lost,) = state(run)["steps"]["rollout_001"]["hosts"]

        set_nodes("DOWN", lost)
        until(lambda: state(run).get("phase") == "requeued", LIMIT_S, "the word of the first attempt")
        set_nodes("RESUME")
        later = RunDir(run.root, run.run_id, 1, "test")
        until(lambda: state(later).get("phase") == "running", 180.0, "the next attempt")
        until(lambda: "from.1" in os.listdir(run.root / "ready"), 60.0, "its trainer")
        go(run)

        until(lambda: slurm.fold(slurm.query(job_id)).phase.is_over, 60.0, "the end of the job")
        assert state(later)["phase"] == "succeeded"
        assert [path.name for path in runs.iterdir()] == [run.root.name]
        held.assert_gone(slurm_conf)
    finally:
        set_nodes("RESUME")
        slurm.cancel_job(job_id)
        until(lambda: slurm.fold(slurm.query(job_id)).phase.is_over, 30.0, "the cancelled job")


def test_the_wrapper_that_submits_leaves_a_job_of_its_own(start: Start, tmp_path: Path) -> None:
    """Nested: the run's job inherits nothing of the small one that submitted it."""
    run_dir = tmp_path / "first light" / "own"
    job = start(
        "libra-submit.sbatch", ["--mem=500M", "--cpus-per-task=1"], [f"launch.run_dir={run_dir}", "rollout_gpus=2"]
    )
    until(lambda: (run_dir / "attempts/0/submission.json").exists(), START_S, "the submission")
    run = RunDir.open(run_dir, writer="test")
    own = int((run.read(run.submission_json) or {})["job_id"])
    await_ready(run, ["trainer.0", "controller.0", "rollout_000.0", "rollout_001.0"], START_S)
    go(run)

    until(lambda: state(run).get("phase") in ("succeeded", "failed"), 60.0, "the end of the run")
    assert state(run)["phase"] == "succeeded", state(run)["cause"]
    assert own != job.job_id
    until(lambda: slurm.fold(slurm.query(own)).phase.is_over, LIMIT_S, "the end of its job")


# ---- salloc ---------------------------------------------------------------------------------------------------------


def salloc(
    folder: Path, words: Sequence[str], options: Sequence[str] = ("--nodes=2", "--gpus-per-node=2", *NODE)
) -> Any:
    command = ["salloc", *options, sys.executable, "-m", "tests.fake_launch", *words]
    out = (folder / "salloc.out").open("w")
    return subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)


def parts(line: str) -> tuple[str, str, str]:
    return line.partition(" ")


def test_a_run_in_salloc_is_the_shells_and_ends_with_it(tmp_path: Path, slurm_conf: Path) -> None:
    run_dir = tmp_path / "run"
    shell = salloc(tmp_path, [*make_model(tmp_path / "model"), f"launch.run_dir={run_dir}"])
    until(lambda: (run_dir / "fake.json").exists(), START_S, "the run directory")
    run = RunDir.open(run_dir, writer="test")
    await_ready(run, SHARED, START_S)
    held = Belongings.of(run)
    record = run.read(run.submission_json) or {}
    mine = f"{sys.executable} -m tests.fake_launch"
    launcher = next(int(pid) for pid, _, command in map(parts, processes_of(run)) if command.startswith(mine))

    os.kill(launcher, signal.SIGKILL)

    shell.wait(LIMIT_S)
    held.assert_gone(slurm_conf)
    assert record["mode"] == "allocation"
    assert state(run)["cause"]["message"].startswith("the launcher")
    assert load(run.config_yaml).slurm.requeue == "never"


def test_ending_the_launcher_in_salloc_ends_the_run_and_not_the_shell(tmp_path: Path, slurm_conf: Path) -> None:
    run_dir = tmp_path / "run"
    words = [*make_model(tmp_path / "model"), f"launch.run_dir={run_dir}"]
    command = " ".join([sys.executable, "-m", "tests.fake_launch", *words])
    script = tmp_path / "shell.sh"
    script.write_text(
        f"{command} &\necho $! > {tmp_path}/pid\nwait $!\necho ended $?\nsrun -n1 --mem=100M --cpus-per-task=1 echo usable\n"
    )
    with (tmp_path / "out").open("w") as out:
        shell = subprocess.Popen(
            ["salloc", "--nodes=2", "--gpus-per-node=2", *NODE, "bash", str(script)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    until(lambda: (run_dir / "fake.json").exists(), START_S, "the run directory")
    run = RunDir.open(run_dir, writer="test")
    await_ready(run, SHARED, START_S)
    held = Belongings.of(run)

    os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)

    shell.wait(60)
    said = (tmp_path / "out").read_text()
    assert "ended 143" in said
    assert "usable" in said
    held.assert_gone(slurm_conf)


@pytest.mark.parametrize(
    ("how", "phase"), [("", "failed"), ("slurm.requeue=requeue", "failed"), ("slurm.requeue=chain", "requeued")]
)
def test_a_run_in_salloc_that_loses_a_node_is_requeued_only_where_another_job_follows(
    tmp_path: Path, slurm_conf: Path, monkeypatch: pytest.MonkeyPatch, how: str, phase: str
) -> None:
    """Slurm does not run the shell of somebody again."""
    monkeypatch.setenv("FAKE_BEHAVIOURS", json.dumps({"trainer": {"do": "train"}}))
    run_dir = tmp_path / "run"
    words = [*make_model(tmp_path / "model"), f"launch.run_dir={run_dir}", *filter(None, [how])]
    shell = salloc(tmp_path, words)
    until(lambda: (run_dir / "fake.json").exists(), START_S, "the run directory")
    run = RunDir.open(run_dir, writer="test")
    await_ready(run, SHARED, START_S)
    held = Belongings.of(run)
    (lost,) = state(run)["steps"]["rollout_001"]["hosts"]

    try:
        set_nodes("DOWN", lost)
        shell.wait(LIMIT_S)
        following: dict[str, Any] = state(run).get("next") or {}

        assert (state(run)["phase"], state(run)["stop"]["kind"]) == (phase, "node_failure")
        left = [int(following["job_id"])] if phase == "requeued" else []
        until(lambda: jobs() == left, LIMIT_S, f"{left} to be all jobs")
        if left:
            later = RunDir(run.root, run.run_id, 1, "test")
            until(lambda: state(later).get("phase") == "running", START_S, "the attempt of the job that follows")
            go(run)
            until(lambda: state(later).get("phase") == "succeeded", START_S, "its end")
    finally:
        set_nodes("RESUME")
        for job in jobs():
            slurm.cancel_job(job)
        await_no_jobs()
    held.assert_gone(slurm_conf)
