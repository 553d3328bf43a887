"""Submission: what sbatch is given, what its refusal becomes, what a job's state is without sacct.

Slurm's programs are played by small scripts first on PATH; they leave what they were given in `calls`.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission

from conf.schema import LibraConfig
from launch import submission as submissions
from launch.executors import (
    ArrayRefusedError,
    HetJob,
    HetJobExecutor,
    SubmitError,
    reattach,
    submit,
)
from launch.hetjob import job_spec, render_job
from launch.machine import choose_mode
from launch.submission import SlurmSubmission, Submission
from launch.supervise import supervise
from planner.plan import Plan
from stages.desired import read_desired
from stages.rundir import RunDir
from tests.fake_runs import fake_config, fake_plan, fake_run
from tests.fake_stages import entry
from tests.slurm_programs import calls, cluster, program, queue

__all__ = ["calls"]


def slurm_run(tmp_path: Path) -> tuple[LibraConfig, Plan, RunDir]:
    config, plan = fake_config("slurm"), fake_plan("hetjob")
    return config, plan, fake_run(tmp_path / "run", config, plan)


def submitted(tmp_path: Path) -> tuple[RunDir, SlurmSubmission]:
    config, plan, run = slurm_run(tmp_path)
    submission = submit(config, plan, run, entry=entry)
    assert isinstance(submission, SlurmSubmission)
    return run, submission


# ---- submitting -----------------------------------------------------------------------------------------------------


def test_the_script_that_is_submitted_is_the_one_of_the_dry_run(tmp_path: Path, calls: Path) -> None:
    config, plan, run = slurm_run(tmp_path)

    submission = submit(config, plan, run, entry=entry)

    text = render_job(config, plan, run.root)
    assert run.job_sbatch.read_text() == text
    assert (run.submitit / "41_submission.sh").read_text() == text
    assert (submission.mode, submission.job_id) == ("slurm", "41")


def test_submitit_finds_the_supervisor_and_the_run_its_desired_state(tmp_path: Path, calls: Path) -> None:
    run, _ = submitted(tmp_path)

    pickled = DelayedSubmission.load(run.submitit / "41_submitted.pkl")

    assert pickled.function is supervise
    assert pickled.args == (str(run.root), 0, entry)
    assert read_desired(run) is not None


def test_sbatch_is_tried_before_it_is_meant(tmp_path: Path, calls: Path) -> None:
    run, _ = submitted(tmp_path)

    first, second = (calls / "sbatch.calls").read_text().splitlines()

    assert first == f"--test-only {run.job_sbatch}"
    assert second.startswith(str(run.submitit))


def test_a_job_submitted_from_inside_a_job_does_not_inherit_it(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")

    submitted(tmp_path)

    environment = (calls / "environment").read_text().splitlines()
    assert "SLURM_CONF=/etc/slurm.conf" in environment
    assert not [line for line in environment if line.startswith(("SLURM_HET", "SBATCH_"))]


def test_the_estimate_of_the_start_is_shown(tmp_path: Path, calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimate = "Job 42 to start at 2026-11-30T02:01:46 using 3 processors on node[0-1]"
    program(calls, "sbatch", f'[ "$1" = --test-only ] && {{ echo "sbatch: {estimate}" >&2; exit 0; }}; echo "job 41"')

    submitted(tmp_path)

    assert f"sbatch --test-only: {estimate}\n" in capsys.readouterr().out


def test_slurms_refusal_is_the_message(tmp_path: Path, calls: Path) -> None:
    program(calls, "sbatch", "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1")
    config, plan, run = slurm_run(tmp_path)

    with pytest.raises(SubmitError, match=r"Requested node configuration is not available.*change slurm\.partition"):
        submit(config, plan, run, entry=entry)


def test_an_unknown_partition_is_refused_with_those_that_there_are(tmp_path: Path, calls: Path) -> None:
    program(calls, "sbatch", "echo 'sbatch: error: invalid partition specified: dve' >&2; exit 1")
    config, plan, run = slurm_run(tmp_path)
    config.slurm.partition = "dve"

    with pytest.raises(SubmitError, match=r"invalid partition specified: dve \(Slurm has dev\)"):
        submit(config, plan, run, entry=entry)


def test_a_partition_that_is_too_small_is_refused_without_asking_for_a_trial(tmp_path: Path, calls: Path) -> None:
    cluster(calls, nodes="node0")
    config, plan, run = slurm_run(tmp_path)

    with pytest.raises(
        SubmitError, match=r"wants 2 nodes \(1 for .* and 1 for rollout\), available 1: .* lower train_gpus"
    ):
        submit(config, plan, run, entry=entry)

    assert not (calls / "sbatch.calls").exists()


def test_a_limit_that_a_trial_does_not_see_is_refused(tmp_path: Path, calls: Path) -> None:
    cluster(calls, limit="30:00")
    config, plan, run = slurm_run(tmp_path)

    with pytest.raises(SubmitError, match=r"slurm\.time_min=60 is more than partition dev allows, 30 min"):
        submit(config, plan, run, entry=entry)


def test_a_node_that_is_down_is_waited_for_although_the_trial_refuses(
    tmp_path: Path, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster(calls, nodes="node[0-1]", state="down*")
    refusal = "allocation failure: Requested node configuration is not available"
    program(calls, "sbatch", f'[ "$1" = --test-only ] && {{ echo "{refusal}" >&2; exit 1; }}; echo "job 41"')

    submitted(tmp_path)

    assert "the job will wait: trainer and controller want" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["kill -SEGV $$", "echo 'Unable to contact slurm controller' >&2; exit 1"])
def test_a_trial_that_gives_no_answer_does_not_stop_the_submission(
    tmp_path: Path, calls: Path, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    program(calls, "sbatch", f'[ "$1" = --test-only ] && {{ {broken}; }}; echo "job 41"')

    _, submission = submitted(tmp_path)

    assert submission.job_id == "41"
    assert "sbatch --test-only gave no answer" in capsys.readouterr().out


def test_a_silent_sinfo_is_said_and_stops_nothing(
    tmp_path: Path, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(calls, "sinfo", "echo 'slurm_load_partitions: down' >&2; exit 1")

    submitted(tmp_path)

    assert "the size of the cluster was not checked: sinfo failed" in capsys.readouterr().err


def test_a_refusal_of_the_real_submission_is_the_message_too(tmp_path: Path, calls: Path) -> None:
    program(calls, "sbatch", '[ "$1" = --test-only ] && exit 0; echo "Job violates accounting policy" >&2; exit 1')
    config, plan, run = slurm_run(tmp_path)

    with pytest.raises(SubmitError, match="Job violates accounting policy"):
        submit(config, plan, run, entry=entry)


def test_ctrl_c_while_sbatch_runs_counts_when_the_job_is_written_down(tmp_path: Path, calls: Path) -> None:
    trial = 'case "$*" in *--test-only*) exit 0;; esac'
    program(calls, "sbatch", f'{trial}; kill -INT "$PPID"; echo "Submitted batch job 41"')
    config, plan, run = slurm_run(tmp_path)

    with pytest.raises(KeyboardInterrupt):
        submit(config, plan, run, entry=entry)

    assert (run.read(run.submission_json) or {})["job_id"] == "41"
    assert (run.submitit / "41_submitted.pkl").is_file()


def test_a_job_that_cannot_be_written_down_is_taken_back(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plan, run = slurm_run(tmp_path)
    write = RunDir.write

    def full(self: RunDir, path: Path, payload: dict[str, Any]) -> None:
        if path == self.submission_json:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, path, payload)

    monkeypatch.setattr(RunDir, "write", full)

    with pytest.raises(SubmitError, match="job 41 was cancelled, as its number could not be written down"):
        submit(config, plan, run, entry=entry)

    assert (calls / "scancel.calls").read_text() == "41\n"


def test_an_array_of_hetjobs_is_refused(tmp_path: Path, calls: Path) -> None:
    config, plan, run = slurm_run(tmp_path)
    executor = HetJobExecutor(run.submitit, job_spec(config, plan, run.root), "python")

    with pytest.raises(ArrayRefusedError, match="submit one hetjob at a time"):
        executor.map_array(print, [1, 2])


@pytest.mark.parametrize("answers, mode", [("Slurmctld(primary) at here is UP", "slurm"), ("is DOWN", "local")])
def test_auto_takes_slurm_when_its_controller_answers(calls: Path, answers: str, mode: str) -> None:
    program(calls, "scontrol", f"echo '{answers}'")

    assert choose_mode("auto") == mode


# ---- asking for the state -------------------------------------------------------------------------------------------


def patient(submission: Submission, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between two questions to Slurm."""
    monkeypatch.setattr(submissions, "QUEUE_FIRST_S", 0.0)
    monkeypatch.setattr(submissions, "QUEUE_LAST_S", 0.0)
    assert isinstance(submission, SlurmSubmission)
    submission._pause_s = 0.0


def test_a_job_is_followed_from_the_queue_to_its_end(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, submission = submitted(tmp_path)
    patient(submission, monkeypatch)

    seen = [submission.poll()]
    queue(calls, "RUNNING|None")
    seen.append(submission.poll())
    run.write(run.state_json, {"phase": "succeeded", "cause": None})
    seen.append(submission.poll())

    assert seen == [("pending", "Resources"), ("running", ""), ("succeeded", "")]
    assert submission.exit_code == 0


def test_the_supervisors_last_word_gives_reason_and_exit_code(tmp_path: Path, calls: Path) -> None:
    run, submission = submitted(tmp_path)
    cause = {"step": "trainer", "message": "killed by SIGKILL", "exit_code": 137}
    run.write(run.state_json, {"phase": "failed", "cause": cause})

    assert submission.poll() == ("failed", "trainer: killed by SIGKILL")
    assert submission.exit_code == 137


def test_a_supervisor_without_last_words_is_reported_with_slurms_state(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, submission = submitted(tmp_path)
    patient(submission, monkeypatch)
    run.write(run.state_json, {"phase": "running", "heartbeat": 5})
    queue(calls, "FAILED|NonZeroExitCode", exit_code="0:9")

    assert submission.poll() == ("failed", "supervisor: component 0 is FAILED, killed by SIGKILL")
    assert submission.exit_code == 1


def test_a_component_that_is_cancelled_does_not_end_the_job(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, submission = submitted(tmp_path)
    patient(submission, monkeypatch)
    queue(calls, "RUNNING|None", "CANCELLED|None")

    assert submission.poll()[0] == "running"


def test_a_silent_slurm_is_unknown_not_failed(tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, submission = submitted(tmp_path)
    patient(submission, monkeypatch)
    program(calls, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")

    state, reason = submission.poll()

    assert state == "unknown"
    assert "Unable to contact slurm controller" in reason


def test_a_forgotten_job_without_last_words_has_failed(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, submission = submitted(tmp_path)
    patient(submission, monkeypatch)
    program(calls, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")

    assert submission.poll()[0] == "failed"


def test_polling_often_asks_slurm_seldom(tmp_path: Path, calls: Path) -> None:
    _, submission = submitted(tmp_path)

    for _ in range(50):
        submission.poll()

    assert (calls / "squeue.calls").read_text().count("ask") == 1


def test_a_heartbeat_that_stands_still_makes_the_launcher_ask_at_once(tmp_path: Path, calls: Path) -> None:
    run, submission = submitted(tmp_path)
    now_s = 100.0
    watched = SlurmSubmission(run, submission.job, clock=lambda: now_s)
    watched._pause_s = 1000.0
    run.write(run.state_json, {"phase": "running", "heartbeat": 5})
    watched.poll()
    queue(calls, "FAILED|None", exit_code="0:9")

    now_s += submissions.STALLED_S
    first = watched.poll()[0]
    now_s += 0.1

    assert (first, watched.poll()[0]) == ("pending", "failed")


def test_cancelling_a_running_job_lets_the_supervisor_stop_in_order(tmp_path: Path, calls: Path) -> None:
    _, submission = submitted(tmp_path)
    queue(calls, "RUNNING|None")

    submission.cancel()

    assert (calls / "scancel.calls").read_text() == "--batch --signal=TERM 41\n"


def test_cancelling_a_pending_job_removes_all_components(tmp_path: Path, calls: Path) -> None:
    _, submission = submitted(tmp_path)

    submission.cancel()

    assert (calls / "scancel.calls").read_text() == "41\n"


def test_submitits_own_job_object_is_done_without_sacct(tmp_path: Path, calls: Path) -> None:
    _, submission = submitted(tmp_path)
    queue(calls, "RUNNING|None")
    assert not submission.job.done(force_check=True)
    queue(calls, "TIMEOUT|None", "COMPLETED|None")
    time.sleep(0.002)  # submitit ignores forced updates within a millisecond

    assert submission.job.done(force_check=True)
    assert submission.job.state == "TIMEOUT"


def test_a_later_launcher_finds_the_job_again(tmp_path: Path, calls: Path) -> None:
    run, submission = submitted(tmp_path)

    found = reattach(run, {"mode": "slurm", "job_id": submission.job_id})

    assert isinstance(found, SlurmSubmission)
    assert isinstance(found.job, HetJob)
    assert found.poll() == ("pending", "Resources")


def test_a_local_run_that_nobody_follows_is_refused(tmp_path: Path) -> None:
    config, plan = fake_config(), fake_plan()
    config.launch.follow = False

    with pytest.raises(SubmitError, match="a local run ends with its launcher"):
        submit(config, plan, fake_run(tmp_path / "run", config, plan), entry=entry)


def test_a_local_run_cannot_be_found_again(tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match="ended with its launcher"):
        reattach(RunDir.create(tmp_path / "run"), {"mode": "local", "job_id": "1"})
