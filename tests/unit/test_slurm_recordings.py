"""What we make of what Slurm really printed: every situation in tests/golden/slurm, for every release recorded there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from launch import allocation, slurm, waiting
from launch.batch_job import parse_facts
from launch.doctor import slurm_facts
from launch.job_states import JOB_STATES, SHORT_CODES
from launch.scrub import scrubbed
from launch.slurm import ComponentState, fold, job_phase
from launch.srun import Allocation, parse_srun_errors
from stages.rollout import address
from tests.slurm_expected import FAILED, JOBS, PENDING, RUNNING
from tests.slurm_recordings import FOLDER, Said, read, situations, versions

SRUN: dict[str, dict[int, int]] = {
    # rank -> exit status, minus the signal
    "srun_exit_code": {1: 7},
    "srun_exit_codes": {0: 2, 2: 4, 3: 5},
    "srun_killed": {2: -9},
    "srun_terminated": {2: -15, 3: -15},
    "srun_segfault": {3: -11},
    "srun_not_found": dict.fromkeys(range(4), 127),
    "srun_no_program": dict.fromkeys(range(4), 2),
    "srun_node_fail": {0: -15, 1: -9},
    "srun_too_many": {},
    "srun_unknown_job": {},
}
REFUSALS: dict[str, str] = {
    "requeue_unknown": "Invalid job id",
    "requeue_component": "not heterogeneous job leader",
    "requeue_forbidden": "disabled",
    "requeue_twice": "pending execution",
    "scancel_component": "not permitted on individual component",
    "sacct_off": "accounting storage is disabled",
    "sbatch_partition": "Invalid partition name",
    "sbatch_partition_inactive": "not available",
    "sbatch_memory": "can not be satisfied",
    "sbatch_gpus": "not available",
    "sbatch_array_het": "Invalid job array",
    "sbatch_no_script": "missing.sh",
    "sbatch_option": "unrecognized option",
    "test_only_too_many": "not available",
    "test_only_het_too_many": "not available",
}
OTHERS = {
    "ahead",
    "config",
    "het_steps",
    "job_states",
    "nodes",
    "partitions",
    "pending_array",
    "requeue",
    "running_steps",
}
OTHERS |= {"sbatch_dependency", "scancel_unknown", "silent", "sinfo", "sinfo_drained", "start_estimates", "test_only"}
OTHERS |= {"environment_batch", "environment_step", "environment_het_batch", "environment_het_step"}
OTHERS |= {"test_only_het", "unknown_job", "unknown_jobs", "versions"}
BY_HAND = "by_hand"
"""Not a release: situations that cannot be had on a test cluster, written after the manual."""
RELEASES = [version for version in versions() if version != BY_HAND]
SITUATIONS = [(version, name) for version in versions() for name in situations(version)]


def recorded(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(version, name) for version, name in SITUATIONS if name in names]


def all_said(version: str, name: str) -> list[Said]:
    return read(FOLDER / version / f"{name}.txt")


def answer(version: str, name: str, program: str, form: str = "") -> str:
    """The output of the command of a situation whose last word is `form` (any, when empty)."""
    for said in all_said(version, name):
        if said.words[0] == program and form in ("", said.words[-1]):
            return said.out
    raise KeyError((version, name, program, form))


def job_of(version: str, name: str) -> int:
    return min(state.job_id for state in slurm.parse_scontrol(answer(version, name, "scontrol")))


def test_no_recording_names_a_folder_of_the_machine_that_made_it() -> None:
    shared_by_all = r"/(dev|usr|bin|lib|lib64|var/log|home/user|cluster|nowhere)(/|\b)|/tmp(?!/)"
    texts = {path: path.read_text() for path in FOLDER.rglob("*.txt")}

    paths = {(path, name) for path, text in texts.items() for name in re.findall(r"(?<![\w./*-])/[a-z][\w./-]*", text)}

    assert paths
    assert not {(path, name) for path, name in paths if not re.match(shared_by_all, name)}


@dataclass
class Replay:
    """In the place of Slurm's commands. `asked` are those that were run."""

    said: list[Said]
    asked: list[str]

    def run(self, arguments: Sequence[str], timeout_s: float = 0.0) -> subprocess.CompletedProcess[str]:
        self.asked.append(arguments[0])
        for one in self.said:
            if list(one.words) == list(arguments):
                return subprocess.CompletedProcess(list(arguments), one.code, one.out, one.err)
        raise AssertionError(f"nobody recorded {' '.join(arguments)}")


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Replay]:
    def make(version: str, name: str) -> Replay:
        player = Replay(all_said(version, name), [])
        monkeypatch.setattr(slurm, "_run", player.run)
        return player

    return make


def test_every_recording_is_looked_at_by_a_test() -> None:
    assert {name for _, name in SITUATIONS} == {*JOBS, *SRUN, *REFUSALS, *OTHERS}


@pytest.mark.parametrize("version", RELEASES)
def test_every_release_has_all_situations(version: str) -> None:
    elsewhere = set(situations(BY_HAND))

    assert set(situations(version)) | elsewhere == {*JOBS, *SRUN, *REFUSALS, *OTHERS}


# ---- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version, name", recorded([*JOBS]))
def test_the_state_of_a_job_is_understood(version: str, name: str, replay: Callable[[str, str], Replay]) -> None:
    player = replay(version, name)
    phase, words = JOBS[name]

    components = slurm.query(job_of(version, name))

    assert fold(components).phase is phase
    assert words in fold(components).text
    assert player.asked == (["squeue", "scontrol"] if phase.is_over else ["squeue"])


@pytest.mark.parametrize("version, name", recorded([*JOBS]))
def test_squeue_and_scontrol_say_the_same_of_each_component(version: str, name: str) -> None:
    def known(states: list[ComponentState]) -> set[tuple[int, int, str, str]]:
        return {(state.job_id, state.offset, state.state, state.nodes) for state in states}

    by_squeue = slurm.parse_squeue(answer(version, name, "squeue", slurm.SQUEUE_FORMAT))
    by_scontrol = slurm.parse_scontrol(answer(version, name, "scontrol"))

    assert known(by_squeue) == known(by_scontrol)
    assert len(by_squeue) == (2 if name.startswith("het_") else 1)


@pytest.mark.parametrize("version, name", recorded([*JOBS]))
def test_short_codes_mean_what_the_words_mean(version: str, name: str) -> None:
    def second(form: str) -> list[str]:
        return [line.split("|")[1] for line in answer(version, name, "squeue", form).splitlines()]

    codes, words = second("%i|%t"), second(slurm.SQUEUE_FORMAT)

    assert [SHORT_CODES[code] for code in codes] == words
    assert [job_phase(code) for code in codes] == [job_phase(word) for word in words]


@pytest.mark.parametrize("version, name", recorded([*JOBS]))
def test_a_waiting_person_is_told_state_and_time(version: str, name: str) -> None:
    job = job_of(version, name)

    found = waiting.parse(answer(version, name, "squeue", waiting.FORMAT))[job]

    assert found.phase is (JOBS[name][0] if not name.startswith("het_") else job_phase(found.state))
    # A limit that is over by some seconds is INVALID.
    assert (found.left_s is None) == (name in ("running_unlimited", "special_exit", "ordinary_timeout"))
    assert found.start is not None or found.phase in (PENDING, FAILED)
    assert found.partitions
    assert all(re.fullmatch(r"[a-z]+", partition) for partition in found.partitions)


@pytest.mark.parametrize("version, name", recorded([name for name in JOBS if JOBS[name][0] is PENDING]))
def test_the_reason_of_a_wait_is_explained(version: str, name: str) -> None:
    found = waiting.parse(answer(version, name, "squeue", waiting.FORMAT))[job_of(version, name)]

    assert re.fullmatch(r".+ \(.+\)", waiting.reason_words(found.reason, found.job_id))


@pytest.mark.parametrize("version, name", recorded([*JOBS]))
def test_a_supervisor_knows_when_its_job_ends_and_how_often_it_began(version: str, name: str) -> None:
    facts = parse_facts(answer(version, name, "scontrol"))

    assert facts is not None
    again = ("requeued", "running_again", "special_exit", "preempted_requeued")
    assert facts.restarts == (1 if name in again else 0)
    if JOBS[name][0] is RUNNING and name != "running_unlimited":
        assert facts.start is not None
        assert facts.end is not None
        assert 0 <= facts.end - facts.start <= 600 + 60
    assert (facts.preempted is not None) == (name == "preempted")


@pytest.mark.parametrize("version", RELEASES)
def test_a_job_without_limit_ends_never(version: str) -> None:
    facts = parse_facts(answer(version, "running_unlimited", "scontrol"))

    # Slurm writes a date a year away, or "Unknown".
    assert facts is not None
    assert facts.end is None or facts.start is None or facts.end - facts.start > 300 * 86400


@pytest.mark.parametrize("version", RELEASES)
def test_an_array_is_not_taken_for_one_of_our_jobs(version: str) -> None:
    assert slurm.parse_squeue(answer(version, "pending_array", "squeue", slurm.SQUEUE_FORMAT)) == []


@pytest.mark.parametrize("version", RELEASES)
def test_jobs_that_are_held_or_wait_for_something_of_their_own_are_not_ahead(version: str) -> None:
    job = waiting.QueuedJob(1, "PENDING", "Priority", (), None, None, 1, ("dev",))

    assert waiting.count_ahead(answer(version, "ahead", "squeue"), job) == 0


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", RELEASES)
def test_steps_have_the_id_of_their_component_and_the_batch_script_is_no_step(version: str) -> None:
    ordinary = slurm.parse_steps(answer(version, "running_steps", "squeue"))
    het = slurm.parse_steps(answer(version, "het_steps", "squeue"))
    leader = job_of(version, "het_running")

    assert ordinary == {"trainer.0": f"{job_of(version, 'running')}.0"}
    assert {name: int(step.partition(".")[0]) for name, step in het.items()} == {
        "trainer.0": leader,
        "rollout_000.0": leader + 1,
    }


@pytest.mark.parametrize("version, name", recorded([*SRUN]))
def test_srun_names_the_tasks_that_ended_badly(version: str, name: str) -> None:
    said = all_said(version, name)[0]

    assert parse_srun_errors(said.err) == SRUN[name]
    assert said.code != 0


# ---- the environment of jobs and steps -------------------------------------------------------------------------------


def environment(version: str, name: str) -> dict[str, str]:
    lines = answer(version, f"environment_{name}", "env").splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize("version", RELEASES)
def test_a_batch_script_is_told_from_a_step(version: str) -> None:
    inside = {name: allocation.is_inside(environment(version, name)) for name in ("batch", "het_batch")}
    steps = {name: allocation.is_inside(environment(version, name)) for name in ("step", "het_step")}

    assert set(inside.values()) == {True}
    assert set(steps.values()) == {False}


@pytest.mark.parametrize("version", RELEASES)
def test_a_supervisor_knows_the_components_of_its_job(version: str) -> None:
    ordinary = Allocation.from_environment(environment(version, "batch"))
    of_het = environment(version, "het_batch")
    nodes = tuple((of_het[f"SLURM_JOB_NODELIST_HET_GROUP_{component}"],) for component in (0, 1))
    het = Allocation.from_environment(of_het)

    assert (len(ordinary.component_ids), ordinary.is_het, len(ordinary.hosts[0])) == (1, False, 1)
    assert het.component_ids == (het.job_id, het.job_id + 1)
    assert (het.is_het, het.hosts) == (True, nodes)
    assert len(set(nodes)) == 2


@pytest.mark.parametrize("version", RELEASES)
def test_a_server_listens_on_loopback_only_when_its_job_is_one_node(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "node_address", lambda: "10.1.2.3")

    assert address.listen_address(environment(version, "step")) == address.LOOPBACK
    assert address.listen_address(environment(version, "het_step")) == "10.1.2.3"


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("name", ["batch", "step", "het_batch", "het_step"])
def test_nothing_of_an_outer_job_goes_into_another(version: str, name: str) -> None:
    left = scrubbed(environment(version, name))

    assert set(left) <= {"SLURM_CONF", "CUDA_VISIBLE_DEVICES"}


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version, name", recorded([*REFUSALS]))
def test_a_refusal_reaches_the_user_in_slurms_words(
    version: str, name: str, replay: Callable[[str, str], Replay]
) -> None:
    words = replay(version, name).said[0].words

    with pytest.raises(slurm.SlurmCommandError, match=re.escape(REFUSALS[name])):
        slurm.command(words)


@pytest.mark.parametrize("version", RELEASES)
def test_a_job_that_slurm_does_not_know_has_no_components(version: str, replay: Callable[[str, str], Replay]) -> None:
    replay(version, "unknown_job")

    assert slurm.query(99999999) == []


@pytest.mark.parametrize("version", RELEASES)
def test_of_several_jobs_the_unknown_ones_are_left_out(version: str, replay: Callable[[str, str], Replay]) -> None:
    replay(version, "unknown_jobs")

    assert waiting.queued([99999998, 99999999]) == {}


@pytest.mark.parametrize("version", RELEASES)
def test_a_dead_controller_is_an_error_and_no_empty_queue(version: str, replay: Callable[[str, str], Replay]) -> None:
    player = replay(version, "silent")

    with pytest.raises(slurm.SlurmCommandError, match=r"slurm_load_jobs error: (Unable to contact|Connection)"):
        slurm.command(player.said[0].words)


@pytest.mark.parametrize("version, name", recorded(["test_only", "test_only_het", "requeue", "scancel_unknown"]))
def test_what_slurm_accepts_is_no_error(version: str, name: str, replay: Callable[[str, str], Replay]) -> None:
    assert slurm.command(replay(version, name).said[0].words) == ""


# ---- the cluster -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", RELEASES)
def test_every_state_that_a_release_names_is_in_the_table(version: str) -> None:
    line = next(line for line in all_said(version, "job_states")[0].err.splitlines() if "Valid" in line)
    named = {word.upper() for word in line.rpartition(": ")[2].split(",")}

    assert {"TIMEOUT", "NODE_FAIL", "SIGNALING"} < named
    assert named <= set(JOB_STATES)


@pytest.mark.parametrize("version", RELEASES)
def test_the_release_is_read_from_every_program(version: str) -> None:
    assert {slurm_facts.parse_version(said.out) for said in all_said(version, "versions")} == {version}


@pytest.mark.parametrize("version", RELEASES)
def test_the_doctor_reads_configuration_nodes_and_partitions(version: str) -> None:
    config = slurm_facts.parse_config(answer(version, "config", "scontrol"))
    nodes = slurm_facts.parse_nodes(answer(version, "nodes", "scontrol"))
    partitions = slurm_facts.parse_partitions(answer(version, "partitions", "scontrol"))

    assert (config["SelectType"], config["SLURM_VERSION"]) == ("select/cons_tres", version)
    assert slurm_facts.SlurmFacts(config=config).parameter("SchedulerParameters", "bf_interval") == "1"
    assert [(node.name, node.version, node.gpus(), node.cpus, node.is_usable) for node in nodes] == [
        (f"node{index}", version, 2, 4, True) for index in range(4)
    ]
    limits = {partition.name: partition.max_minutes for partition in partitions}
    assert limits == {**dict.fromkeys(["dev", "low", "spare", "high", "closing", "closed", "down"]), "small": 5}
    assert [partition.name for partition in partitions if partition.is_default] == ["dev"]
