"""What the doctor reads from Slurm's text output, and what it makes of it.

Outputs of 22.05.8 were recorded (tests/golden/doctor). Those of later releases are written after their documentation
(scontrol(1), slurm.conf(5), changelogs), and say so: they were not recorded.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.doctor.commands import Answer
from launch.doctor.evidence import Evidence, HetjobStory, JobStory
from launch.doctor.finding import Status
from launch.doctor.probes import hetjob, job, memory, partition, scheduler, versions
from launch.doctor.slurm_facts import (
    NodeFacts,
    PartitionFacts,
    SlurmFacts,
    count_gpus,
    parse_config,
    parse_nodes,
    parse_partitions,
    parse_version,
    release,
)
from tests.doctor_kit import CONFIG, NODES, PARTITIONS, healthy, only, slurm_facts, with_config

# Documented, not recorded: 25.05 with real GPUs, one node in use, one drained, one that was never heard of.
DOCUMENTED_NODES_25_05 = """\
NodeName=gpu01 Arch=x86_64 CoresPerSocket=56 CPUAlloc=12 CPUEfctv=110 CPUTot=112 CPULoad=1.02 AvailableFeatures=h100,ib \
ActiveFeatures=h100,ib Gres=gpu:h100:8(S:0-1) GresDrain=N/A NodeAddr=gpu01 NodeHostName=gpu01 Version=25.05.1 \
OS=Linux 5.14.0 #1 SMP RealMemory=2000000 AllocMem=0 State=MIXED+PLANNED ThreadsPerCore=1 Partitions=gpu,all Comment=a b
NodeName=gpu02 CPUTot=112 Gres=gpu:h100:8(S:0-1) Version=25.05.1 RealMemory=2000000 State=IDLE+DRAIN Partitions=gpu,all
NodeName=gpu03 CPUTot=112 Gres=gpu:h100:8(S:0-1) RealMemory=2000000 State=UNKNOWN+NOT_RESPONDING Partitions=gpu
NodeName=cpu01 CPUTot=64 Gres=(null) Version=25.05.1 RealMemory=256000 State=IDLE+CLOUD+POWERED_DOWN Partitions=all
"""
DOCUMENTED_CONFIG_25_05 = """\
Configuration data as of 2026-03-01T08:00:00
PreemptMode             = REQUEUE
PreemptParameters       = send_user_signal,min_exempt_priority=100
PreemptType             = preempt/qos
ProctrackType           = proctrack/cgroup
SchedulerParameters     = bf_continue,bf_hetjob_immediate,bf_interval=60
SchedulerType           = sched/backfill
SLURM_VERSION           = 25.05.1
TaskPlugin              = task/cgroup,task/affinity
"""


# ---- reading -----------------------------------------------------------------------------------------------------------


def test_the_recorded_configuration_is_read() -> None:
    config = parse_config(CONFIG)

    assert len(config) > 150
    assert config["SLURM_VERSION"] == "22.05.8"
    assert config["SchedulerParameters"] == "bf_interval=1,batch_sched_delay=0"
    assert config["AuthInfo"].endswith("cred_expire=15"), "a value may hold the sign that separates"


def test_the_recorded_nodes_are_read() -> None:
    nodes = parse_nodes(NODES)

    assert [node.name for node in nodes] == ["node0", "node1", "node2", "node3"]
    assert nodes[0] == NodeFacts("node0", "22.05.8", 4, 8000 * 2**20, "gpu:2", "IDLE", ("dev",))


def test_the_recorded_partition_is_read() -> None:
    assert parse_partitions(PARTITIONS) == [PartitionFacts("dev", True, "UP", "UNLIMITED", "UNLIMITED")]


def test_documented_nodes_of_a_later_release_are_read() -> None:
    nodes = {node.name: node for node in parse_nodes(DOCUMENTED_NODES_25_05)}

    assert (nodes["gpu01"].cpus, nodes["gpu01"].gpus()) == (110, 8), (
        "without the processors that Slurm keeps for itself"
    )
    assert [node.name for node in nodes.values() if node.is_usable] == ["gpu01", "cpu01"]
    assert nodes["gpu03"].version == ""
    assert nodes["cpu01"].gpus() == 0


@pytest.mark.parametrize(
    "gres, count",
    [
        ("gpu:2", 2),
        ("gpu:h100:8(S:0-3)", 8),
        ("gpu:a100:4(S:0),gpu:v100:2(S:1)", 6),
        ("gpu:h100:8(S:0-1),shard:h100:32(S:0-1)", 8),
        ("nvme:1", 0),
        ("gpu", 1),
        ("", 0),
    ],
)
def test_gpus_are_counted_in_gres(gres: str, count: int) -> None:
    assert count_gpus(gres) == count


def test_only_gpus_of_the_wanted_type_count() -> None:
    assert count_gpus("gpu:a100:4(S:0),gpu:v100:2(S:1)", "v100") == 2
    assert count_gpus("gpu:2", "h100") == 0


@pytest.mark.parametrize(
    "text, version",
    [("slurm-wlm 22.05.8", "22.05.8"), ("slurm 25.05.1-1", "25.05.1"), ("slurm 24.11", "24.11"), ("", "")],
)
def test_versions_are_read(text: str, version: str) -> None:
    assert parse_version(text) == version


def test_releases_compare_as_numbers() -> None:
    assert release("23.02.4") < release("23.11.0") < release("25.05.1")
    assert release("nothing") == (0, 0)


@pytest.mark.parametrize(
    "text, minutes", [("UNLIMITED", None), ("00:30:00", 30), ("1-12:00:00", 36 * 60), ("infinite", None)]
)
def test_time_limits_are_read(text: str, minutes: int | None) -> None:
    assert PartitionFacts("p", True, "UP", text, "1").max_minutes == minutes


def test_what_slurm_does_not_answer_is_said_and_left_empty() -> None:
    facts = slurm_facts({("scontrol", "show", "config"): Answer(1, "", "slurm_load_ctl_conf error: Access denied\n")})

    assert facts.config == {}
    assert "Access denied" in facts.trouble
    assert len(facts.nodes) == 4
    (finding,) = scheduler.judge(healthy(slurm=facts))
    assert finding.status is Status.NOT_TRIED
    assert "Access denied" in finding.seen


def test_only_nodes_of_the_wanted_partition_count() -> None:
    partitions = PARTITIONS.replace("PartitionName=dev", "PartitionName=other").replace("Default=YES", "Default=NO")
    answers: dict[tuple[str, ...], Answer] = {
        ("scontrol", "-o", "show", "partition"): Answer(0, PARTITIONS + partitions)
    }

    assert len(slurm_facts(answers).nodes) == 4
    assert slurm_facts(answers, partition="other").nodes == ()


# ---- versions ------------------------------------------------------------------------------------------------------------


def test_one_release_everywhere_is_fine() -> None:
    assert {finding.status for finding in versions.judge(healthy())} == {Status.OK}


def test_a_slurm_older_than_22_05_is_a_problem() -> None:
    finding = only(versions.judge(healthy(slurm=with_config(SLURM_VERSION="21.08.8"))), "Slurm version")

    assert finding.status is Status.PROBLEM


def test_a_later_release_is_said_not_to_have_been_tried() -> None:
    finding = only(versions.judge(healthy(slurm=with_config(SLURM_VERSION="25.05.1"))), "Slurm version")

    assert finding.status is Status.OK
    assert "only that release was tried" in finding.libra


def test_clients_and_daemons_of_different_releases_are_named() -> None:
    facts = replace(slurm_facts(), versions={"srun": "23.11.4", "sinfo": "22.05.8"})
    finding = only(versions.judge(healthy(slurm=facts)), "releases of client and daemons")

    assert finding.status is Status.NOTE
    assert "srun here 23.11.4" in finding.seen
    assert "slurmd of node0, node1, node2, node3 22.05.8" in finding.seen


@pytest.mark.parametrize(
    "slurmd, srun, status",
    [
        ("25.05.1", "24.11.5", Status.PROBLEM),
        ("25.05.8", "24.11.5", Status.NOTE),
        ("25.11.5", "23.11.1", Status.PROBLEM),
        ("25.11.6", "23.11.1", Status.NOTE),
        ("24.11.5", "23.11.1", Status.NOTE),
    ],
)
def test_a_slurmd_that_crashes_on_steps_of_an_older_srun_is_a_problem(slurmd: str, srun: str, status: Status) -> None:
    """Changelog of 25.05.8 and 25.11.6."""
    facts = slurm_facts()
    nodes = tuple(replace(node, version=slurmd) for node in facts.nodes)
    facts = replace(facts, nodes=nodes, versions={"srun": srun})

    assert only(versions.judge(healthy(slurm=facts)), "releases of client and daemons").status is status


def test_without_slurm_only_that_is_said() -> None:
    evidence = Evidence(mode="local", quick=True, absent="sbatch is not on PATH")

    (finding,) = versions.judge(evidence)

    assert finding.status is Status.NOTE
    assert "sbatch is not on PATH" in finding.seen
    assert [probe.judge(evidence) for probe in (scheduler, partition, hetjob, job)] == [[], [], [], []]


def test_a_slurm_that_does_not_answer_is_a_problem() -> None:
    (finding,) = versions.judge(Evidence(mode="local", quick=True, absent="no controller answers", silent=True))

    assert finding.status is Status.PROBLEM


# ---- scheduler -----------------------------------------------------------------------------------------------------------


def test_the_development_cluster_is_judged_by_its_recorded_configuration() -> None:
    findings = scheduler.judge(healthy())

    assert {finding.name: finding.status for finding in findings} == {
        "scheduler": Status.OK,
        "resource selection": Status.OK,
        "KillWait": Status.NOTE,
        "MinJobAge": Status.OK,
        "preemption": Status.OK,
        "requeue": Status.OK,
        "accounting": Status.OK,
        "process tracking": Status.NOTE,
        "task plugin": Status.NOTE,
        "exit codes": Status.OK,
    }
    assert "bf_interval 1 s" in only(findings, "scheduler").seen


def test_the_documented_configuration_of_a_later_release_is_judged() -> None:
    facts = SlurmFacts(config=parse_config(DOCUMENTED_CONFIG_25_05))
    findings = scheduler.judge(healthy(slurm=facts))

    assert "bf_hetjob_immediate" in only(findings, "scheduler").seen
    assert only(findings, "preemption").status is Status.OK
    assert only(findings, "process tracking").status is Status.OK
    assert only(findings, "task plugin").status is Status.OK
    assert only(findings, "KillWait").status is Status.NOT_TRIED, "the text does not have it"


@pytest.mark.parametrize(
    "name, option, value, status, word",
    [
        ("scheduler", "SchedulerType", "sched/builtin", Status.NOTE, "slurm.layout=single"),
        ("scheduler", "SchedulerParameters", "(null)", Status.OK, "60 s longer"),
        ("resource selection", "SelectType", "select/cons_res", Status.PROBLEM, "select/cons_tres"),
        ("resource selection", "SelectType", "select/linear", Status.NOTE, "whole nodes"),
        ("KillWait", "KillWait", "30 sec", Status.OK, "within it"),
        ("MinJobAge", "MinJobAge", "2 sec", Status.NOTE, "run directory"),
        ("requeue", "JobRequeue", "0", Status.OK, "--requeue"),
        ("accounting", "AccountingStorageType", "accounting_storage/slurmdbd", Status.OK, "slurm.account"),
        ("exit codes", "RequeueExit", "137", Status.NOTE, "once more"),
    ],
)
def test_each_setting_has_its_judgement(name: str, option: str, value: str, status: Status, word: str) -> None:
    finding = only(scheduler.judge(healthy(slurm=with_config(**{option: value}))), name)

    assert finding.status is status
    assert word in finding.libra


def test_preemption_without_a_signal_is_noted() -> None:
    quiet = with_config(PreemptType="preempt/qos", PreemptMode="REQUEUE")
    older = replace(quiet, config={**quiet.config, "SchedulerParameters": "preempt_send_user_signal"})

    assert only(scheduler.judge(healthy(slurm=quiet)), "preemption").status is Status.NOTE
    assert only(scheduler.judge(healthy(slurm=older)), "preemption").status is Status.OK


@pytest.mark.parametrize("kinds, status", [("CR_CORE_MEMORY", Status.OK), ("CR_CORE", Status.NOTE)])
def test_consumable_memory_is_recognised(kinds: str, status: Status) -> None:
    findings = memory.judge(healthy(slurm=with_config(SelectTypeParameters=kinds)))

    assert only(findings, "memory is shared out").status is status


# ---- partition, hetjob, job ------------------------------------------------------------------------------------------------


def test_alike_nodes_are_one_line() -> None:
    finding = only(partition.judge(healthy()), "nodes")

    assert finding.seen == "4 alike: 4 processors, 8.4 GB, gpu:2"


def test_nodes_that_differ_are_noted() -> None:
    facts = slurm_facts()
    mixed = replace(facts, nodes=(replace(facts.nodes[0], cpus=64, gres=""), *facts.nodes[1:]))

    finding = only(partition.judge(healthy(slurm=mixed)), "nodes")

    assert finding.status is Status.NOTE
    assert "node0: 64 processors" in finding.seen
    assert "no GPUs" in finding.seen


@pytest.mark.parametrize("what", ["down", "drained", "nowhere"])
def test_a_partition_without_working_nodes_is_a_problem(what: str) -> None:
    facts = slurm_facts(partition="nowhere" if what == "nowhere" else "")
    if what == "down":
        assert facts.partition is not None
        facts = replace(facts, partition=replace(facts.partition, state="DOWN"))
    if what == "drained":
        facts = replace(facts, nodes=tuple(replace(node, state="IDLE+DRAIN") for node in facts.nodes))

    finding = only(partition.judge(healthy(slurm=facts)), "partition")

    assert finding.status is Status.PROBLEM


def test_refused_hetjobs_make_the_layout_single() -> None:
    evidence = healthy(hetjob=HetjobStory(False, "sbatch: error: hetjobs are not allowed here"))

    (finding,) = hetjob.judge(evidence)

    assert finding.status is Status.NOTE
    assert "not allowed here" in finding.seen
    assert "slurm.layout=single" in finding.libra
    assert hetjob.must_be_single(evidence)


def test_hetjobs_that_never_start_make_the_layout_single() -> None:
    assert hetjob.must_be_single(healthy(slurm=with_config(SchedulerType="sched/builtin")))
    assert not hetjob.must_be_single(healthy())


def test_a_hetjob_that_was_not_asked_for_claims_nothing() -> None:
    evidence = healthy(hetjob=HetjobStory(None, "fewer than two nodes"))

    (finding,) = hetjob.judge(evidence)

    assert finding.status is Status.NOT_TRIED
    assert not hetjob.must_be_single(evidence)


@pytest.mark.parametrize(
    "story, quick, status",
    [
        (HetjobStory(True, "", "COMPLETED", 2.0), False, Status.OK),
        (HetjobStory(True, "a real one ended as FAILED", "FAILED", 2.0), False, Status.PROBLEM),
        (HetjobStory(True, "still PENDING", "PENDING", 300.0), False, Status.NOT_TRIED),
        (HetjobStory(True, ""), True, Status.NOT_TRIED),
    ],
)
def test_a_real_hetjob_is_judged_by_its_end(story: HetjobStory, quick: bool, status: Status) -> None:
    finding = only(hetjob.judge(healthy(hetjob=story, quick=quick)), "a real heterogeneous job")

    assert finding.status is status


@pytest.mark.parametrize(
    "story, status",
    [
        (JobStory(7, "COMPLETED", ("node0",), 3.0), Status.OK),
        (JobStory(0, "REFUSED", (), 0.0, "sbatch refused: Invalid account"), Status.PROBLEM),
        (JobStory(7, "PENDING", (), 300.0, "still PENDING after 300 s (Priority)"), Status.NOT_TRIED),
        (JobStory(7, "FAILED", (), 1.0, "it ended as FAILED before its first word"), Status.PROBLEM),
        (JobStory(7, "CANCELLED", ("node0",), 1.0), Status.NOTE),
    ],
)
def test_the_doctors_own_job_is_judged(story: JobStory, status: Status) -> None:
    (finding,) = job.judge(healthy(job=story))

    assert finding.status is status
    assert not story.trouble or story.trouble in finding.seen
