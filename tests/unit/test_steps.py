"""Running steps: command lines, real subprocesses with fake stages, verdicts from exit codes and results, leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.scrub import scrubbed
from launch.srun import INTO_OWN_LOG, Allocation, parse_srun_errors, srun_command
from launch.steps import STEP_ID_VARIABLE, Incarnation, Step, StepStartError, StepStatus, exception_text, tail
from launch.subprocesses import GpuPool, SubprocessRunner, visible_gpus
from launch.sweep import marked, sweep
from launch.verdict import Cause, Success, judge
from stages.desired import StepSpec
from stages.rundir import RunDir
from tests.fake_runs import await_ready, fake_config, fake_plan, fake_run, go, until
from tests.fake_stages import entry

SPEC = StepSpec("trainer", "trainer", 0, 0, 1, 2, 2, 1, 2, grace_s=2.0)

# ---- real subprocesses ----------------------------------------------------------------------------------------------


class Bench:
    """A run directory and a local runner; everything started is gone at the end of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runner = SubprocessRunner(sys.executable, None)
        self.started: list[Step] = []
        self.run: RunDir

    def start(self, told: dict[str, Any], spec: StepSpec = SPEC, gpus: Sequence[str] | None = None) -> Step:
        self.run = fake_run(self.root / "run", fake_config(), fake_plan(), {spec.name: told})
        if gpus is not None:
            self.runner = SubprocessRunner(sys.executable, GpuPool(gpus))
        incarnation = Incarnation(spec, self.run, "77")
        incarnation.write_pickle(entry, 60)
        step = self.runner.start(incarnation)
        self.started.append(step)
        return step

    def ready(self, step: Step) -> dict[str, int]:
        return await_ready(self.run, [f"{step.spec.name}.{rank}" for rank in range(step.spec.tasks)])

    def verdict(self, step: Step) -> Success | Cause:
        verdict = until(lambda: judge(step, step.status(), 0.0, 0.0), 30.0, "a verdict")
        assert isinstance(verdict, Success | Cause)
        return verdict


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.runner.kill(made.started)
    for step in made.started:
        until(lambda step=step: step.status().ended, 10.0, "the end of a killed step")  # type: ignore[misc]
        sweep(step.incarnation.step_id)


def test_a_step_whose_tasks_all_return_is_a_success_with_their_results(bench: Bench) -> None:
    step = bench.start({"do": "succeed"})

    assert bench.verdict(step) == Success({0: {"worked": True}, 1: {"worked": True}})


def test_a_raising_rank_is_named_with_its_exception(bench: Bench) -> None:
    step = bench.start({"do": "fail", "ranks": [1]})
    go(bench.run)

    cause = bench.verdict(step)

    assert isinstance(cause, Cause)
    assert cause.message == "rank 1 exited 1: tests.fake_stages.FakeStageError: the boiler burst\nat 3 bar"
    assert cause.exit_code == 1
    assert "trainer rank 1 of 2, local 1" in cause.log_tail
    assert "submitit/core" not in cause.log_tail


def test_a_killed_task_is_named_while_the_others_still_run(bench: Bench) -> None:
    step = bench.start({"do": "serve"})
    os.kill(bench.ready(step)["trainer.1"], signal.SIGKILL)

    cause = bench.verdict(step)

    assert isinstance(cause, Cause)
    assert (cause.kind, cause.message, cause.exit_code) == ("signal", "rank 1 killed by SIGKILL", 137)
    assert not step.status().ended


def test_the_stages_own_exit_code_is_kept(bench: Bench) -> None:
    step = bench.start({"do": "leave", "code": 7}, replace(SPEC, tasks=1))
    go(bench.run)

    cause = bench.verdict(step)

    assert isinstance(cause, Cause)
    assert (cause.message, cause.exit_code) == ("exited 7", 7)


def test_exit_code_zero_without_a_result_is_a_failure(bench: Bench) -> None:
    step = bench.start({"do": "leave", "code": 0}, replace(SPEC, tasks=1))
    go(bench.run)

    cause = bench.verdict(step)

    assert isinstance(cause, Cause)
    assert "exit code 0 but without a result" in cause.message


def test_a_stage_that_is_asked_to_stop_says_so(bench: Bench) -> None:
    step = bench.start({"do": "serve"})
    bench.ready(step)
    bench.runner.ask_to_stop([step])

    verdict = bench.verdict(step)

    assert isinstance(verdict, Success)
    assert verdict.was_stopped


def test_a_stage_that_ignores_term_is_ended_by_kill(bench: Bench) -> None:
    step = bench.start({"do": "hang", "ignore_term": True})
    bench.ready(step)

    bench.runner.ask_to_stop([step])
    bench.runner.kill([step])

    until(lambda: step.status().ended, 10.0, "the end of a killed step")
    assert step.status().exits == {0: -signal.SIGKILL, 1: -signal.SIGKILL}


def test_a_grandchild_that_left_its_session_is_swept_by_its_mark(bench: Bench) -> None:
    step = bench.start({"do": "serve", "grandchild": True}, replace(SPEC, tasks=1))
    bench.ready(step)
    pid = int((bench.run.root / "ready" / "trainer.grandchild").read_text())
    bench.runner.kill([step])
    until(lambda: step.status().ended, 10.0, "the end of a killed step")
    assert [left.pid for left in marked(step.incarnation.step_id)] == [pid]

    found = sweep(step.incarnation.step_id)

    assert [left.pid for left in found] == [pid]
    assert marked(step.incarnation.step_id) == []


def test_a_sweep_leaves_other_steps_alone() -> None:
    environment = {**os.environ, STEP_ID_VARIABLE: "run.0.rollout_10/"}
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
    try:
        until(lambda: marked("run.0.rollout_10/"), 10.0, "the marked process")

        assert sweep("run.0.rollout_1/") == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(10)


def test_steps_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", fake_config(), fake_plan(), {"trainer": {"do": "serve", "ignore_term": True}})
    code = (
        "import sys; from pathlib import Path; from tests.unit.test_steps import SPEC, Incarnation, SubprocessRunner, entry, RunDir;"
        "run = RunDir.open(Path(sys.argv[1]), writer='x'); inc = Incarnation(SPEC, run, '77'); inc.write_pickle(entry, 60);"
        "SubprocessRunner(sys.executable, None).start(inc); sys.stdin.read()"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(run.root)], stdin=subprocess.PIPE)
    await_ready(run, ["trainer.0", "trainer.1"])

    starter.kill()
    starter.wait(10)

    until(lambda: not marked(f"{run.run_id}."), 5.0, "the tasks to die with their starter")


def test_gpus_of_this_machine_are_shared_out_one_step_each(bench: Bench) -> None:
    pool = GpuPool(["4", "5", "6"])

    first, second = pool.take(2, "trainer"), pool.take(1, "rollout_000")
    with pytest.raises(StepStartError, match="rollout_001 wants 1 GPUs, free 0 of 3"):
        pool.take(1, "rollout_001")
    pool.give_back(first)

    assert (first, second, pool.take(2, "trainer")) == (["4", "5"], ["6"], ["4", "5"])


def test_a_step_without_gpus_sees_none_and_one_with_gpus_sees_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with_gpus = bench.start({"do": "serve"}, replace(SPEC, tasks=1), gpus=["4", "5"])
    pid = bench.ready(with_gpus)["trainer.0"]

    assert b"CUDA_VISIBLE_DEVICES=4,5" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.parametrize("value, gpus", [("0,1", ["0", "1"]), ("", []), ("GPU-abc, GPU-def", ["GPU-abc", "GPU-def"])])
def test_visible_gpus_follow_the_environment(value: str, gpus: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == gpus


# ---- srun -----------------------------------------------------------------------------------------------------------

HET = {
    "SLURM_JOB_ID": "41",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "41",
    "SLURM_JOB_ID_HET_GROUP_1": "42",
    "SLURM_JOB_NODELIST": "node0",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node0",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node[1-2]",
}
ORDINARY = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-3]"}


def words(spec: StepSpec, environment: dict[str, str], tmp_path: Path) -> list[str]:
    incarnation = Incarnation(spec, RunDir.create(tmp_path / "run"), "41")
    return srun_command(incarnation, Allocation.from_environment(environment), "/opt/python")


def test_a_step_of_a_hetjob_names_its_component_and_node(tmp_path: Path) -> None:
    spec = StepSpec("rollout_001", "rollout", 1, 1, 1, 1, 1, 4, 2)

    line = words(spec, HET, tmp_path)

    for word in ("--jobid=41", "--het-group=1", "--nodelist=node2", "--nodes=1", "--ntasks=1", "--cpus-per-task=4"):
        assert word in line
    for word in (
        "--exact",
        "--gpus-per-node=2",
        "--mem=0",
        "--mpi=none",
        "--cpu-bind=none",
        "--job-name=rollout_001.0",
    ):
        assert word in line
    assert line[-5:-1] == ["/opt/python", "-u", "-m", "stages.start"]


def test_a_step_without_gpus_says_so(tmp_path: Path) -> None:
    assert "--gpus-per-node=0" in words(StepSpec("controller", "controller", 0, 0, 1, 1, 1, 1, 0), HET, tmp_path)


def test_a_step_of_an_ordinary_job_has_no_component(tmp_path: Path) -> None:
    line = words(StepSpec("trainer", "trainer", 0, 0, 2, 4, 2, 1, 2, mem_bytes=2**31), ORDINARY, tmp_path)

    assert not any(word.startswith("--het-group") for word in line)
    assert "--nodelist=gpu1,gpu2" in line
    assert "--mem=2048M" in line


@pytest.mark.parametrize("component, node", [(2, 0), (1, 2)])
def test_a_place_that_the_job_does_not_have_is_an_error(tmp_path: Path, component: int, node: int) -> None:
    with pytest.raises(StepStartError, match=f"component {component}"):
        words(StepSpec("rollout_000", "rollout", component, node, 1, 1, 1, 1, 1), HET, tmp_path)


@pytest.mark.parametrize(
    "line, exits",
    [
        ("srun: error: node0: task 1: Exited with exit code 7", {1: 7}),
        ("srun: error: node0: tasks 0-1,3: Killed", {0: -9, 1: -9, 3: -9}),
        ("srun: error: node0: task 2: Segmentation fault (core dumped)", {2: -11}),
        ("srun: error: node0: task 0: Out Of Memory", {0: -9}),
        ("srun: error: node0: task 0: Something that a later Slurm says", {0: 1}),
        ("srun: cluster configuration lacks support for cpu binding", {}),
        ("srun: Job step aborted: Waiting up to 7 seconds for job step to finish.", {}),
    ],
)
def test_srun_tells_which_task_failed(line: str, exits: dict[int, int]) -> None:
    assert parse_srun_errors(f"srun: first line\n{line}\n") == exits


# ---- verdicts and texts ---------------------------------------------------------------------------------------------


class EndedStep(Step):
    pid = 1

    def status(self) -> StepStatus:
        return StepStatus(True, {0: 0})


def test_a_missing_result_is_waited_for_before_it_is_a_failure(tmp_path: Path) -> None:
    step = EndedStep(Incarnation(replace(SPEC, tasks=1), RunDir.create(tmp_path / "run"), "1"))

    assert judge(step, step.status(), waited_s=1.0, result_wait_s=5.0) is None
    assert isinstance(judge(step, step.status(), waited_s=5.0, result_wait_s=5.0), Cause)


def test_a_restarted_step_does_not_see_results_of_its_earlier_start(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    first, second = Incarnation(SPEC, run, "1"), Incarnation(SPEC, run, "1", 1)

    assert first.folder != second.folder
    assert first.unique_name != second.unique_name
    assert first.step_id != second.step_id


def test_the_last_exception_of_a_chain_is_the_cause() -> None:
    text = """
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in <module>
    f()
    ^^^
stages.rollout.VllmStartError: the server exited 1; its last lines:
  | OSError: port taken
"""
    assert exception_text(text.splitlines()) == (
        "stages.rollout.VllmStartError: the server exited 1; its last lines:\n  | OSError: port taken"
    )


def test_each_task_writes_to_the_log_of_its_own_rank(tmp_path: Path) -> None:
    """srun's %t would count from -1 in a hetjob (24.11 on)."""
    stem = tmp_path / "it's a $log" / "trainer"
    stem.parent.mkdir()
    for rank in ("0", "1"):
        command = [
            "/bin/sh",
            "-c",
            INTO_OWN_LOG,
            str(stem),
            "/bin/sh",
            "-c",
            'echo "$1"; echo "$2" >&2; exit 7',
            "x",
            "a b",
            "$c",
        ]
        done = subprocess.run(command, env={"SLURM_PROCID": rank}, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"")

    assert {path.name: path.read_text() for path in stem.parent.iterdir()} == {
        "trainer.0.log": "a b\n$c\n",
        "trainer.1.log": "a b\n$c\n",
    }


def test_a_log_without_a_traceback_has_no_exception() -> None:
    assert exception_text(["all is well", "exited"]) == ""


def test_the_tail_of_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert tail(tmp_path / "none.log") == []


def test_scrubbing_keeps_only_what_a_nested_job_may_see() -> None:
    outer = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/s.conf",
        "SLURM_HET_SIZE": "2",
        "SLURM_CPU_BIND": "q",
        "SRUN_CPUS_PER_TASK": "1",
        "SBATCH_PARTITION": "p",
        "PMIX_RANK": "0",
        "SUBMITIT_EXECUTOR": "slurm",
        "RANK": "3",
        "MASTER_PORT": "29500",
    }

    assert scrubbed(outer) == {"PATH": "/bin", "SLURM_CONF": "/etc/s.conf"}
