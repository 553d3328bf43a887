"""Slurm's words: every job state, recorded outputs of its commands, folding of components."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import slurm
from launch.slurm import (
    ComponentState,
    JobPhase,
    expand_nodes,
    fold,
    job_phase,
    parse_scontrol,
    parse_squeue,
    parse_steps,
)

# squeue(1) "JOB STATE CODES" of 22.05 to 25.11, base states and flags.
DOCUMENTED = re.findall(
    r"\w+",
    """
    BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE EXPEDITING FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PENDING
    POWER_UP_NODE PREEMPTED RUNNING RECONFIG_FAIL RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING REVOKED SIGNALING
    SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED TIMEOUT UPDATE_DB
    """,
)

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
    assert sorted(slurm.JOB_STATES) == sorted(DOCUMENTED)


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


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("node0", ["node0"]),
        ("node[0-2]", ["node0", "node1", "node2"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]),
        ("", []),
    ],
)
def test_node_lists_are_expanded_in_the_order_written(text: str, hosts: list[str]) -> None:
    assert expand_nodes(text) == hosts


def test_a_broken_node_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a Slurm node list"):
        expand_nodes("node[0-1")


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


def test_commands_do_not_see_the_outer_job(fake_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    program(fake_path, "squeue", 'echo "$SQUEUE_STATES|$SLURM_JOB_ID|$SLURM_CONF"')

    assert slurm.command(["squeue"]) == "||/etc/here.conf\n"


def test_scancels_complaint_about_a_step_is_ignored(fake_path: Path, tmp_path: Path) -> None:
    program(fake_path, "scancel", f'echo "$@" > {tmp_path}/args; exit 225')

    slurm.cancel_steps(["9.2", "10.0"], "TERM")

    assert (tmp_path / "args").read_text() == "--signal=TERM 9.2 10.0\n"
