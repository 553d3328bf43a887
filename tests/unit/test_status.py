"""`python -m launch.status` and `launch.list`: what they say about each kind of run, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import figures, list, status
from launch.report import headline, report, text
from launch.runs import Folder, NotARunError
from launch.truth import tell_one
from stages.controller.history import read_history
from stages.rundir import RunDir
from tests.fake_slurm import FakeSlurm, Job, beating, short_looks, slurm_in_memory
from tests.made_runs import (
    CAUSE,
    STEP,
    another_attempt,
    finished,
    made,
    new_run,
    saved,
    says,
    serves,
    take_away,
    trained,
)

__all__ = ["short_looks", "slurm_in_memory"]
pytestmark = pytest.mark.usefixtures("slurm_in_memory", "short_looks")


def shown(run: RunDir) -> str:
    return text(report(tell_one(run.root)))


def line(run: RunDir, head: str) -> str:
    """The row of a report that begins with `head`."""
    return next(row for row in shown(run).splitlines() if row.strip().startswith(head))


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm_in_memory: FakeSlurm) -> RunDir:
    run = made(tmp_path / "run", "running")
    trained(run, 7)
    saved(run, 4)
    serves(run, "rollout_000", 7)
    serves(run, "rollout_001", 6)
    slurm_in_memory.jobs[41] = Job("RUNNING", nodes="gpu[01-02]", left="2:00:00")
    beating(run, monkeypatch)
    return run


# ---- a running run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("state", ["running"]),
        ("job", ["Slurm job 41", "gpu01, gpu02", "2:00:00 left"]),
        ("step", ["7/10", "2.00 s a step", "ETA 0:06"]),
        ("reward", ["0.500", "1,000 tokens/s"]),
        ("weights", ["v7 is the newest", "1 of 2 instances serve it"]),
        ("rollout_001", ["ready v6, beats"]),
        ("refresh", ["0.070 s"]),
        ("checkpoint", ["step 4, 3 steps trained since", "saved in 0.25 s"]),
        ("time", ["mean of the last 7", "generate 1.50 s", "grpo_update 0.50 s"]),
        ("disk", ["kB"]),
        ("next", ["python -m launch.follow"]),
    ],
)
def test_a_running_run_is_shown_with(running: RunDir, head: str, words: tuple[str, ...]) -> None:
    found = line(running, head)

    for word in words:
        assert word in found


def test_an_instance_without_heartbeat_is_named_and_does_not_count_as_serving(
    running: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = figures.instances

    def silent(truth: Any) -> Any:
        return [figures.Instance(one.name, one.state, 7, one.host, beats=False) for one in real(truth)]

    monkeypatch.setattr(figures, "instances", silent)

    assert "0 of 2 instances serve it" in line(running, "weights")
    assert "no heartbeat in" in line(running, "rollout_000")


def test_of_many_instances_only_the_odd_ones_are_named(running: RunDir) -> None:
    for number in range(2, 12):
        serves(running, f"rollout_{number:03d}", 7)

    words = shown(running)

    assert "11 of 12 instances serve it" in words
    assert "rollout_001 ready v6" in words
    assert "rollout_005" not in words


def test_restarts_within_the_attempt_are_counted(running: RunDir) -> None:
    events = [{"event": "step", "name": "rollout_000", "state": "running"}] * 3
    running.events_jsonl.write_text("".join(f"{json.dumps(event)}\n" for event in events))

    assert "rollout_000 2x" in line(running, "attempt")


def test_a_later_attempt_says_why_and_from_where(tmp_path: Path) -> None:
    first = made(tmp_path / "run", "failed", cause=CAUSE)
    says(another_attempt(first, "requeue", step=4), "succeeded")

    assert "1 (requeue, from step 4; before it: 0 failed (trainer: rank 1 killed by SIGKILL))" in line(first, "attempt")


# ---- other states --------------------------------------------------------------------------------------------------------


def test_a_pending_run_says_reason_place_and_estimate(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run")
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 600))
    slurm_in_memory.jobs[41] = Job("PENDING", "Resources", start=soon, priority=50)
    slurm_in_memory.others = ["40|90|Priority", "39|80|Priority"]

    found = line(run, "waits")

    for words in ("Resources (waiting for free nodes)", "2 jobs come first in partition gpu", "expects it to start at"):
        assert words in found


def test_a_failed_run_says_cause_log_tail_and_how_to_go_on(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "failed", cause=CAUSE)
    trained(run, 7)
    saved(run, 4)

    words = shown(run)

    for part in ("failed (exit code 137)", "trainer: rank 1 killed by SIGKILL", "| loss 0.4", "launch.logs"):
        assert part in words
    assert "python -m launch.resume" in words
    assert "go on from step 4" in words


def test_a_failed_run_without_checkpoint_is_not_told_to_resume(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "failed", cause=CAUSE)
    trained(run, 7)

    words = shown(run)

    assert "launch.resume" not in words
    assert "--config-path" in words


def test_a_vanished_run_shows_the_last_lines_of_its_supervisor(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", "running")
    (run.logs / "supervisor.log").write_text("slurmstepd: error: could not open the log\n")
    slurm_in_memory.jobs[41] = Job("FAILED", exit_code="1:0")

    words = shown(run)

    assert "vanished" in words
    assert "| slurmstepd: error: could not open the log" in words


def test_the_log_of_a_job_that_never_started_is_not_offered(tmp_path: Path, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run")
    run.write(run.cancel_json, {"checkpoint": False, "by": "ada@login1"})
    slurm_in_memory.jobs[41] = Job("CANCELLED")

    words = shown(run)

    assert "before it started" in words
    assert "launch.logs" not in words
    assert "--config-path" in words


def test_a_half_deleted_run_names_what_is_missing(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "succeeded")
    take_away(run, "weights", "plan.json")

    words = shown(run)

    assert "weights/ (missing)" in headline(report(tell_one(run.root)))
    assert "half-deleted (otherwise: succeeded)" in words
    assert "missing or damaged: weights/ (missing)" in words
    assert "missing or damaged: plan.json (missing)" in words


def test_a_damaged_checkpoint_is_named_beside_the_one_that_counts(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "failed", cause=CAUSE)
    saved(run, 4)
    (saved(run, 6) / "rank_00000.safetensors").write_bytes(b"")

    words = shown(run)

    assert "step 4" in line(run, "checkpoint")
    assert "checkpoints/step_000006 is damaged" in words


def test_steps_that_were_left_behind_do_not_count(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "failed", cause=CAUSE)
    trained(run, 8)
    with open(run.metrics_jsonl, "a") as out:
        out.write(json.dumps({"event": "resumed", "attempt": 1, "from_step": 4}) + "\n" + '{"half')

    assert "4/10" in line(run, "step")


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 5).map(lambda step: -1 - step)), max_size=12))
def test_the_steps_that_count_are_those_that_the_controller_counts(
    tmp_path_factory: pytest.TempPathFactory, drawn: Sequence[int]
) -> None:
    """A number is the line of a step, a negative one the beginning of another attempt."""
    records = [
        {"step": number} if number >= 0 else {"event": "resumed", "attempt": 1, "from_step": -1 - number}
        for number in drawn
    ]
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))

    assert set(figures.counting_steps(figures.tail_records(path))) == set(read_history(path).steps)


def test_a_stop_in_progress_says_why(running: RunDir) -> None:
    says(running, "stopping", stop={"kind": "time_limit", "reason": "the time limit is near"})

    assert "stopping" in line(running, "state")
    assert "the time limit is near" in line(running, "state")


# ---- the command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "job", "code"),
    [
        ("succeeded", None, 0),
        ("failed", None, 1),
        ("", Job("PENDING", "Priority"), 0),
        ("running", Job("RUNNING"), 0),
        ("requeued", Job("PENDING", "BeginTime"), 0),
        ("running", None, 1),
    ],
)
def test_exit_codes(tmp_path: Path, phase: str, job: Job | None, code: int, slurm_in_memory: FakeSlurm) -> None:
    run = made(tmp_path / "run", phase)
    slurm_in_memory.jobs = {41: job} if job else {}

    assert status.main([str(run.root)]) == code


def test_json_holds_the_same_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run", "failed", cause=CAUSE)
    trained(run, 7)
    saved(run, 4)

    status.main([str(run.root), "--json"])
    said = json.loads(capsys.readouterr().out)

    assert (said["state"], said["job_id"], said["cause"]["exit_code"]) == ("failed", "41", 137)
    assert (said["progress"]["done"], said["checkpoint"]["step"], said["newest_version"]) == (7, 4, 7)


def test_all_is_one_line_a_run_and_the_exit_code_of_the_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path / "one")
    made(tmp_path / "two", "failed", cause=CAUSE)

    code = status.main(["--all", "--root", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()

    assert code == 1
    assert [line.partition(": ")[2] for line in lines] == [
        "succeeded, step 10/10",
        "failed, step 0/100, trainer: rank 1 killed by SIGKILL",
    ]


def test_a_run_of_another_layout_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "one", "succeeded")
    new_run(tmp_path / "two").run_json.write_text('{"schema_version": 99, "run_id": "x"}')

    code = status.main(["--all", "--root", str(tmp_path)])
    said = capsys.readouterr()

    assert code == 0
    assert "succeeded" in said.out
    assert "layout 99" in said.err


def test_an_empty_folder_has_no_runs(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match="no run below"):
        status.main(["--all", "--root", str(tmp_path)])


def test_what_is_no_run_exits_2_without_a_stack_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.status", str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert "is not a run directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_loads_neither_torch_nor_submitit_nor_hydra() -> None:
    code = "import sys, launch.status; print(*sorted({'torch', 'submitit', 'hydra', 'vllm'} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == ""


def test_a_long_run_is_told_in_less_than_a_second(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "succeeded")
    lines = [json.dumps(STEP | {"step": step, "total_steps": 200_000, "version": step + 1}) for step in range(50_000)]
    run.metrics_jsonl.write_text("\n".join(lines) + "\n")
    started_s = time.process_time()  # of this process: the machine may be busy

    said = report(tell_one(run.root))

    assert said.progress.done == 50_000
    assert time.process_time() - started_s < 1.0


# ---- list ----------------------------------------------------------------------------------------------------------------


def test_the_list_has_a_row_for_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "one")
    made(tmp_path / "sweep" / "0_seed-1", "failed", "local", cause=CAUSE)

    assert list.main(["--root", str(tmp_path)]) == 0
    titles, *rows = (row.split() for row in capsys.readouterr().out.splitlines())

    assert titles == ["run", "experiment", "state", "step", "reward", "made", "job"]
    assert [row[:5] for row in rows] == [
        ["one", "grpo_7b", "succeeded", "10/10", "0.500"],
        ["sweep/0_seed-1", "grpo_7b", "failed", "0/100", "-"],
    ]
    assert [row[-1] for row in rows] == ["41", "local"]


def test_the_list_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "one", "succeeded")

    list.main(["--root", str(tmp_path), "--json"])

    assert json.loads(capsys.readouterr().out)[0]["state"] == "succeeded"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("conf/experiment/grpo_7b.yaml", "grpo_7b"),
        ("/home/ada/mine/experiment/team/arithmetic.yaml", "team/arithmetic"),
        ("command line", ""),
    ],
)
def test_the_experiment_is_known_by_what_it_set(tmp_path: Path, source: str, wanted: str) -> None:
    run = made(tmp_path / "run", "succeeded")
    config = run.config_yaml.read_text().replace("conf/experiment/grpo_7b.yaml", source)
    run.config_yaml.write_text(f"# python -m launch +experiment/other.yaml\n{config}")

    assert figures.experiment(Folder.at(run.root)) == wanted


def test_a_headline_is_one_line(tmp_path: Path) -> None:
    cause = CAUSE | {"message": "exited 1: ValueError: first\nsecond"}
    run = made(tmp_path / "run", "failed", cause=cause)

    assert "\n" not in headline(report(tell_one(run.root)))
