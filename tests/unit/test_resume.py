"""Going on with a run: what may change, what is refused and why, what the next attempt gets, and that a refusal leaves no trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import load
from launch import executors, pipeline, resume
from launch.errors import ConfigError
from launch.executors import SubmitError
from launch.resume import ResumeError, Resumption, prepare, start
from launch.runs import NotARunError
from launch.tree import Tree
from stages.desired import write_desired
from stages.rundir import RunDir
from tests.fake_slurm import FakeSlurm, Job, short_looks, slurm_in_memory
from tests.made_runs import CAUSE, desired_of, saved, says, take_away, trained

__all__ = ["short_looks", "slurm_in_memory"]
pytestmark = pytest.mark.usefixtures("slurm_in_memory", "short_looks")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of the demo that failed after step 7 of 250, with a checkpoint of step 4."""
    prepared = pipeline.prepare(
        ["+experiment=demo", "cluster=devcluster", f"launch.run_dir={tmp_path}/run", "launch.follow=false"]
    )
    run = pipeline.create_run(prepared)
    write_desired(run, desired_of(prepared))
    run.write(run.submission_json, {"mode": "slurm", "job_id": "41"})
    says(run, "failed", cause=CAUSE)
    trained(run, 7)
    saved(run, 4)
    return run


def contents(run: RunDir) -> dict[str, bytes]:
    return {str(path.relative_to(run.root)): path.read_bytes() for path in run.root.rglob("*") if path.is_file()}


# ---- a resumption --------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_its_newest_checkpoint_as_the_next_attempt(run: RunDir) -> None:
    resumption = prepare(run.root, [])

    assert (resumption.attempt, resumption.checkpoint.step, resumption.changes) == (1, 4, ())
    assert "attempt 1 from step 4 of 250 (step_000004)" in resumption.text()


def test_preparing_changes_nothing(run: RunDir) -> None:
    before = contents(run)

    prepare(run.root, ["slurm.time_min=5"])

    assert contents(run) == before


def test_what_changes_is_shown_and_has_its_source_in_the_new_configuration(run: RunDir) -> None:
    resumption = prepare(run.root, ["slurm.time_min=5", "total_steps=300", "launch.follow=false"])

    assert [str(change) for change in resumption.changes] == ["total_steps: 250 -> 300", "slurm.time_min: 30 -> 5"]
    assert resumption.prepared.sources["slurm.time_min"] == "resume (attempt 1)"
    assert resumption.prepared.sources["batch_size"] == "conf/experiment/demo.yaml"
    assert resumption.prepared.config.slurm.time_min == 5


def test_the_plan_is_made_again_with_the_same_layout(run: RunDir) -> None:
    again = prepare(run.root, ["slurm.layout=single"]).prepared.plan

    before = pipeline.prepare(["+experiment=demo", "cluster=devcluster"]).plan
    assert (again.train.dp, again.train.tp) == (before.train.dp, before.train.tp)
    assert [one.name for one in again.rollout.instances] == [one.name for one in before.rollout.instances]
    assert (before.layout, again.layout) == ("hetjob", "single")


def test_an_older_checkpoint_is_taken_when_the_newest_is_damaged(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved(run, 6) / "rank_00000.safetensors").write_bytes(b"")

    assert prepare(run.root, []).checkpoint.step == 4
    assert "step_000006 is damaged" in capsys.readouterr().err


def test_a_finished_run_can_be_trained_on(run: RunDir) -> None:
    says(run, "succeeded")
    saved(run, 250)
    run.write(run.summary_json, {"steps": 250, "checkpoint": "weights/v000007"})

    with pytest.raises(ResumeError, match=r"nothing left to train.*total_steps="):
        prepare(run.root, [])
    assert prepare(run.root, ["total_steps=300"]).checkpoint.step == 250


def test_what_the_launcher_would_choose_otherwise_today_is_no_change(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.settle.sys.executable", "/another/python")
    monkeypatch.setenv("XDG_CACHE_HOME", "/another/cache")

    assert prepare(run.root, []).changes == ()


def test_tracing_can_be_turned_on_by_the_environment(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run.config_yaml.read_text().replace("phase_trace_enabled: true", "phase_trace_enabled: false")
    run.config_yaml.write_text(text)
    monkeypatch.setenv("RL_TRAIN_PHASE_TRACE", "1")

    assert [change.name for change in prepare(run.root, []).changes] == ["phase_trace_enabled"]


# ---- refusals ------------------------------------------------------------------------------------------------------------


def cut_off(run: RunDir) -> None:
    take_away(run, "checkpoints/step_000004")


def damage(run: RunDir) -> None:
    (run.checkpoint(4) / "rank_00000.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    [
        (cut_off, [], [r"has no checkpoint to go on from \(save_interval=10\)", "launch.replace_finished=true"]),
        (damage, [], ["has only damaged checkpoints"]),
        (lambda run: None, ["batch_size=8", "seed=3"], ["batch_size=8 may not change", "seed=3 may not", "NEW"]),
        (lambda run: None, ["train_gpus=2"], ["train_gpus=2 may not change", "another layout comes later"]),
        (lambda run: None, ["totl_steps=8"], ["did you mean 'total_steps'"]),
        (lambda run: None, ["total_steps=-1"], ["total_steps=-1"]),
        (
            lambda run: None,
            ["launch.run_dir=elsewhere"],
            ["launch.run_dir=.* may not change", "a run goes on where it is"],
        ),
        (lambda run: None, ["total_steps=3"], ["nothing left to train"]),
        (lambda run: take_away(run, "ledger"), [], [r"is not whole: ledger/ \(missing\)"]),
        (lambda run: take_away(run, "plan.json"), [], [r"plan.json \(missing\)"]),
        (lambda run: take_away(run, "run.json"), [], [r"run.json \(missing\)"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    run: RunDir, spoil: Callable[[RunDir], None], words: list[str], said: list[str]
) -> None:
    spoil(run)
    before = contents(run)

    with pytest.raises((ResumeError, ConfigError)) as caught:
        prepare(run.root, words)

    assert caught.value.exit_code == 2
    for part in said:
        assert re.search(part, str(caught.value))
    assert contents(run) == before


def test_the_way_out_is_not_counted_as_a_problem(run: RunDir) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)^1 problem in .*for a new run with it: python -m launch --config-path"
    ) as caught:
        prepare(run.root, ["seed=3"])

    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(("phase", "state"), [("", "pending"), ("requeued", "requeued")])
def test_a_run_that_waits_in_the_queue_is_not_resumed(
    run: RunDir, phase: str, state: str, slurm_in_memory: FakeSlurm
) -> None:
    slurm_in_memory.jobs[41] = Job("PENDING", "Priority")
    if phase:
        says(run, phase)
    else:
        take_away(run, "attempts/0/state.json", "attempts/0/events.jsonl")

    with pytest.raises(ResumeError, match=f"is {state}, it cannot be resumed; to see it: python -m launch.status"):
        prepare(run.root, [])


def test_a_silent_run_whose_job_runs_is_not_resumed(run: RunDir, slurm_in_memory: FakeSlurm) -> None:
    says(run, "running")
    slurm_in_memory.jobs[41] = Job("RUNNING")

    with pytest.raises(ResumeError, match="is running, it cannot be resumed"):
        prepare(run.root, [])


def test_a_vanished_run_is_resumed(run: RunDir) -> None:
    says(run, "running")

    assert prepare(run.root, []).attempt == 1


def test_a_run_of_which_nobody_knows_is_resumed_only_on_a_persons_word(run: RunDir, slurm_in_memory: FakeSlurm) -> None:
    says(run, "running")
    slurm_in_memory.is_down = True

    with pytest.raises(ResumeError, match="--certainly-over"):
        prepare(run.root, [])
    assert prepare(run.root, [], certainly_over=True).attempt == 1


def test_what_an_attempt_makes_itself_may_be_missing(run: RunDir) -> None:
    take_away(run, "weights", "instances", "desired.json", "attempts/0/logs", "control")

    assert prepare(run.root, []).attempt == 1


def test_no_run_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotARunError):
        prepare(tmp_path, [])


# ---- starting it ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def submissions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was submitted; Slurm accepts everything as job 42."""
    found: list[tuple[Any, ...]] = []

    def submit(config: Any, plan: Any, run: RunDir, *, entry: Any) -> Any:
        found.append((config, plan, run, run.read(run.attempt_json)))
        return SimpleNamespace(mode="slurm", job_id="42")

    monkeypatch.setattr(executors, "submit", submit)
    return found


def started(run: RunDir, *words: str) -> tuple[RunDir, Resumption]:
    resumption = prepare(run.root, words)
    return start(resumption)[0], resumption


def test_the_next_attempt_has_its_records_before_and_after_it_is_submitted(
    run: RunDir, submissions: list[tuple[Any, ...]]
) -> None:
    later, _ = started(run)

    before = submissions[0][3]
    after = later.read(later.attempt_json) or {}
    assert (before["reason"], before["resumed_step"], before["previous"], before["job_id"]) == ("resume", 4, 0, "")
    assert (after["job_id"], later.attempt) == ("42", 1)
    assert (later.read(later.submission_json) or {})["job_id"] == "42"
    assert (later.attempt_dir / "logs").is_dir()


def test_the_new_configuration_is_that_of_the_run_with_the_changes(
    run: RunDir, submissions: list[tuple[Any, ...]]
) -> None:
    old = load(run.config_yaml)
    later, _ = started(run, "slurm.time_min=5")

    new = load(later.config_yaml)
    assert new.slurm.time_min == 5
    assert new.batch_size == old.batch_size
    lines = later.config_yaml.read_text().splitlines()
    assert "  time_min: 5  # resume (attempt 1)" in lines
    assert "batch_size: 384  # conf/experiment/demo.yaml" in lines
    assert (later.read(later.plan_json) or {})["attempt"] == 1


def test_a_resumption_that_nobody_accepts_leaves_the_run_as_it_was(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: Any, plan: Any, run: RunDir, *, entry: Any) -> Any:
        run.write(run.desired_json, {"phase": "run"})
        run.job_sbatch.write_text("#!/bin/bash\n")
        raise SubmitError("invalid partition")

    monkeypatch.setattr(executors, "submit", refuse)
    before = contents(run)

    with pytest.raises(SubmitError, match="invalid partition"):
        started(run, "slurm.partition=nowhere")

    assert contents(run) == before
    run.check_fence()


def test_two_resumptions_at_once_make_one_attempt(run: RunDir, submissions: list[tuple[Any, ...]]) -> None:
    first, second = prepare(run.root, []), prepare(run.root, [])
    start(first)

    with pytest.raises(ResumeError, match="has got another attempt meanwhile"):
        start(second)

    assert len(submissions) == 1


def test_folders_and_the_token_that_were_deleted_are_made_again(
    run: RunDir, submissions: list[tuple[Any, ...]]
) -> None:
    take_away(run, "instances", "weights", "token")

    later, _ = started(run)

    assert later.instances.is_dir()
    assert len(later.token_file.read_text()) > 20


def test_a_dry_run_shows_the_script_of_the_next_attempt_and_writes_nothing(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)

    code = resume.main([str(run.root), "slurm.time_min=7", "launch.dry_run=true"])
    shown = capsys.readouterr().out

    assert code == 0
    for part in ("attempt 1 from step 4", "slurm.time_min: 30 -> 7", "#SBATCH --time=7", "attempts/1/logs"):
        assert part in shown
    assert contents(run) == before


def test_without_follow_the_command_ends_when_the_job_is_submitted(
    run: RunDir, submissions: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "warm_up", lambda _config: None)

    assert resume.main([str(run.root)]) == 0
    assert "slurm job 42, attempt 1" in capsys.readouterr().out


def test_the_command_to_start_over_moves_the_run_aside_and_makes_the_same_one(run: RunDir) -> None:
    """What a run without checkpoint is told to do."""
    words = [f"launch.run_dir={run.root}", "launch.replace_finished=true"]

    again = pipeline.create_run(pipeline.prepare(words, Tree(str(run.root))))

    assert again.run_id != run.run_id
    assert load(again.config_yaml).batch_size == load(run.root.with_name("run.1") / "config.yaml").batch_size
