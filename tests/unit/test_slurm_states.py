"""Slurm's words: every job state, recorded outputs of its commands, folding of components."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import slurm
from launch.job_states import BASE_STATES, SHORT_CODES, STATE_FLAGS
from launch.slurm import (
    ComponentState,
    JobPhase,
    fold,
    job_phase,
    parse_scontrol,
    parse_squeue,
    parse_steps,
)

# squeue(1), "JOB STATE CODES" of 22.05, 24.11 and 26.05 (one list in all three), and the manual's page "Job State Codes".
SQUEUE_CODES = """
    BF BOOT_FAIL CA CANCELLED CD COMPLETED CF CONFIGURING CG COMPLETING DL DEADLINE F FAILED NF NODE_FAIL OOM OUT_OF_MEMORY
    PD PENDING PR PREEMPTED R RUNNING RD RESV_DEL_HOLD RF REQUEUE_FED RH REQUEUE_HOLD RQ REQUEUED RS RESIZING RV REVOKED
    SI SIGNALING SE SPECIAL_EXIT SO STAGE_OUT ST STOPPED S SUSPENDED TO TIMEOUT
"""
BASE = """
    BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PENDING PREEMPTED RUNNING SUSPENDED TIMEOUT
"""
FLAGS = """
    COMPLETING CONFIGURING EXPEDITING LAUNCH_FAILED POWER_UP_NODE RECONFIG_FAIL REQUEUED REQUEUE_FED REQUEUE_HOLD RESIZING
    RESV_DEL_HOLD REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED UPDATE_DB
"""
DOCUMENTED = [*BASE.split(), *FLAGS.split()]

# 22.05.8, `squeue -h -t all -j 41 -o '%i|%T|%r|%N'`
SQUEUE_RUNNING = "41+0|RUNNING|None|node0\n41+1|RUNNING|None|node[1-2]\n"
SQUEUE_PENDING = "             50+0|PENDING|Resources|\n             50+1|PENDING|None|\n"
# 22.05.8, `scontrol -o show job 41`, shortened behind NodeList
SCONTROL_FAILED = (
    "JobId=41 HetJobId=41 HetJobOffset=0 JobName=my job HetJobIdSet=41-42 UserId=u(1) Priority=42 JobState=FAILED"
    " Reason=NonZeroExitCode Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=7:0 Partition=dev"
    " ReqNodeList=(null) ExcNodeList=(null) NodeList=node0 BatchHost=node0 Command=/tmp/a b/j.sh JobState=x WorkDir=/tmp\n"
    "JobId=42 HetJobId=41 HetJobOffset=1 JobName=my job HetJobIdSet=41-42 UserId=u(1) Priority=41 JobState=CANCELLED"
    " Reason=None Requeue=0 ExitCode=0:15 Partition=dev NodeList=(null) BatchHost=node1\n"
)
SCONTROL_ORDINARY = "JobId=7 JobName=x UserId=u(1) JobState=COMPLETED Reason=None ExitCode=0:0 NodeList=gpu[01-04]\n"


def test_every_documented_state_has_a_meaning() -> None:
    assert (sorted(BASE_STATES), sorted(STATE_FLAGS)) == (sorted(BASE.split()), sorted(FLAGS.split()))


def test_every_documented_short_code_is_known() -> None:
    words = SQUEUE_CODES.split()

    assert dict(zip(words[::2], words[1::2], strict=True)) == SHORT_CODES


@pytest.mark.parametrize("code", sorted(SHORT_CODES))
def test_a_short_code_means_what_its_word_means(code: str) -> None:
    assert job_phase(code) is job_phase(SHORT_CODES[code]) is slurm.JOB_STATES[SHORT_CODES[code]]


@pytest.mark.parametrize(
    "state, exit_code, reason, words",
    [
        ("NODE_FAIL", "0:1", "NodeDown", "NODE_FAIL, NodeDown"),  # 24.11; no process got signal 1
        ("OUT_OF_MEMORY", "0:125", "OutOfMemory", "OUT_OF_MEMORY, OutOfMemory"),
        ("DEADLINE", "0:1", "DeadLine", "DEADLINE, DeadLine"),
        ("FAILED", "0:9", "RaisedSignal:9(Killed)", "FAILED, killed by SIGKILL"),
        (
            "FAILED",
            "0:53",
            "JobLaunchFailure",
            "FAILED, Slurm could not write the job's log on its node: the folder is missing there, or closed to the user,"
            " JobLaunchFailure",
        ),
        ("FAILED", "7:0", "NonZeroExitCode", "FAILED, exit code 7"),
        ("CANCELLED", "0:0", "None", "CANCELLED"),
        ("TIMEOUT", "0:15", "TimeLimit", "TIMEOUT, killed by SIGTERM, TimeLimit"),
    ],
)
def test_a_message_says_state_cause_and_reason_once(state: str, exit_code: str, reason: str, words: str) -> None:
    assert ComponentState(1, 0, state, reason, "", exit_code).text == f"component 0 is {words}"


@pytest.mark.parametrize("name", ["JobState=COMPLETED", "a UserId=1 b", "x JobState=RUNNING ExitCode=3:0 y"])
def test_a_jobs_name_is_not_taken_for_its_state(name: str) -> None:
    text = f"JobId=7 JobName={name} UserId=u(1) JobState=FAILED Reason=None ExitCode=7:0 NodeList=n1\n"

    assert parse_scontrol(text)[0] == ComponentState(7, 0, "FAILED", "None", "n1", "7:0")


@pytest.mark.parametrize(
    "state", ["TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "CANCELLED", "FAILED", "BOOT_FAIL", "DEADLINE"]
)
def test_a_job_that_did_not_finish_is_a_failure(state: str) -> None:
    assert job_phase(state) is JobPhase.FAILED


def test_only_completed_is_a_success() -> None:
    assert [state for state, phase in slurm.JOB_STATES.items() if phase is JobPhase.SUCCEEDED] == ["COMPLETED"]


@pytest.mark.parametrize("text", ["CANCELLED by 1000", "CANCELLED+", "cancelled"])
def test_decorated_states_are_understood(text: str) -> None:
    assert job_phase(text) is JobPhase.FAILED


@pytest.mark.parametrize("text", ["", "   ", "SHINY_NEW_STATE"])
def test_an_unknown_word_is_unknown_and_not_over(text: str) -> None:
    assert job_phase(text) is JobPhase.UNKNOWN
    assert not job_phase(text).is_over


def test_squeue_gives_every_component_with_its_own_id() -> None:
    assert parse_squeue(SQUEUE_RUNNING) == [
        ComponentState(41, 0, "RUNNING", "None", "node0"),
        ComponentState(42, 1, "RUNNING", "None", "node[1-2]"),
    ]
    assert [state.reason for state in parse_squeue(SQUEUE_PENDING)] == ["Resources", "None"]


def test_squeue_of_an_ordinary_job_is_one_component() -> None:
    assert parse_squeue("9|RUNNING|None|n1\n") == [ComponentState(9, 0, "RUNNING", "None", "n1")]


def test_scontrol_gives_exit_codes() -> None:
    leader, other = parse_scontrol(SCONTROL_FAILED)

    assert (leader.job_id, leader.offset, leader.exit_code, leader.nodes) == (41, 0, "7:0", "node0")
    assert (other.job_id, other.offset, other.state, other.nodes) == (42, 1, "CANCELLED", "")
    assert leader.state == "FAILED"  # not the word in Command=
    assert "exit code 7" in leader.text
    assert "killed by SIGTERM" in other.text


def test_scontrol_of_an_ordinary_job_is_component_zero() -> None:
    assert parse_scontrol(SCONTROL_ORDINARY) == [ComponentState(7, 0, "COMPLETED", "None", "gpu[01-04]", "0:0")]


def test_step_ids_are_found_by_name_and_batch_steps_are_left_out() -> None:
    text = "9.2|trainer.0\n9.3|controller.0\n9.batch|batch\n10.0|rollout_000.0\n"

    assert parse_steps(text) == {"trainer.0": "9.2", "controller.0": "9.3", "rollout_000.0": "10.0"}


def components(*states: str) -> list[ComponentState]:
    return [ComponentState(100 + offset, offset, state) for offset, state in enumerate(states)]


@pytest.mark.parametrize(
    "states, folded",
    [
        (("RUNNING", "RUNNING"), "RUNNING"),
        (("COMPLETED", "COMPLETED"), "COMPLETED"),
        (("TIMEOUT", "COMPLETED"), "TIMEOUT"),  # the leader's limit ended component 1 (22.05)
        (("COMPLETED", "NODE_FAIL"), "NODE_FAIL"),
        (("RUNNING", "CANCELLED"), "RUNNING"),  # a component handed back: the supervisor lives on
        (("COMPLETING", "FAILED"), "COMPLETING"),
    ],
)
def test_folding_components(states: tuple[str, ...], folded: str) -> None:
    assert fold(components(*states)).state == folded


@given(st.lists(st.sampled_from(DOCUMENTED), min_size=1, max_size=5))
def test_a_folded_job_succeeded_only_if_no_component_failed(states: list[str]) -> None:
    folded = fold(components(*states)).phase

    if folded is JobPhase.SUCCEEDED:
        assert JobPhase.FAILED not in [job_phase(state) for state in states]
    assert folded.is_over == job_phase(states[0]).is_over


def test_folding_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no component"):
        fold([])


# ---- commands, played by small programs first on PATH ---------------------------------------------------------------


@pytest.fixture
def fake_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_running_job_is_asked_of_squeue_only(fake_path: Path) -> None:
    program(fake_path, "squeue", "printf '41+0|RUNNING|None|a\\n41+1|RUNNING|None|b\\n'")
    program(fake_path, "scontrol", "exit 99")

    assert [state.state for state in slurm.query(41)] == ["RUNNING", "RUNNING"]


def test_the_exit_code_of_a_finished_job_comes_from_scontrol(fake_path: Path) -> None:
    program(fake_path, "squeue", "echo '7|COMPLETED|None|gpu'")
    program(fake_path, "scontrol", f"cat <<'END'\n{SCONTROL_ORDINARY}END")

    assert slurm.query(7)[0].exit_code == "0:0"


def test_a_job_that_slurm_has_forgotten_has_no_components(fake_path: Path) -> None:
    program(fake_path, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")

    assert slurm.query(7) == []


def test_a_controller_that_does_not_answer_is_not_taken_for_a_finished_job(fake_path: Path) -> None:
    program(fake_path, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")

    with pytest.raises(slurm.SlurmCommandError, match="Unable to contact slurm controller"):
        slurm.query(7)


def test_a_command_that_hangs_is_given_up(fake_path: Path) -> None:
    program(fake_path, "squeue", "exec sleep 60")

    with pytest.raises(slurm.SlurmCommandError, match=r"squeue did not answer within 0\.2 s"):
        slurm.command(["squeue"], timeout_s=0.2)


def test_a_missing_program_is_named(fake_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_path))

    with pytest.raises(slurm.SlurmCommandError, match="scancel is not on PATH"):
        slurm.cancel_job(1)


# Each changes what a command prints or whom it asks: a time format of its own, hidden jobs, another cluster.
FOREIGN = [
    "SQUEUE_STATES",
    "SQUEUE_FORMAT",
    "SLURM_TIME_FORMAT",
    "SLURM_CLUSTERS",
    "SINFO_FORMAT",
    "SACCT_FORMAT",
    "SCONTROL_ALL",
    "SLURM_JOB_ID",
]


def test_commands_do_not_see_the_outer_job_nor_what_its_user_likes(
    fake_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FOREIGN:
        monkeypatch.setenv(name, "relative")
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    program(fake_path, "squeue", "env | sort | grep -E '^(SLURM|SQUEUE|SINFO|SACCT|SCONTROL)_'")

    assert slurm.command(["squeue"]) == "SLURM_CONF=/etc/here.conf\n"


def test_scancels_complaint_about_a_step_is_ignored(fake_path: Path, tmp_path: Path) -> None:
    program(fake_path, "scancel", f'echo "$@" > {tmp_path}/args; exit 225')

    slurm.cancel_steps(["9.2", "10.0"], "TERM")

    assert (tmp_path / "args").read_text() == "--signal=TERM 9.2 10.0\n"
