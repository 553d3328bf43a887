"""What the doctor makes of measurements on the nodes: one healthy cluster, and one thing at a time that is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launch.doctor.evidence import Evidence, GpuAsking, JobStory
from launch.doctor.finding import Status, has_problems
from launch.doctor.probes import (
    cpus,
    interpreter,
    judge_all,
    limits,
    memory,
    packages,
    shm,
)
from tests.doctor_kit import changed, healthy, only

NO_JOB = JobStory(state="PENDING", trouble="job 7 was still PENDING after 300 s (Priority)")


def nothing_ran() -> Evidence:
    return healthy(job=NO_JOB, nodes={}, steps={}, programs={})


# ---- all of them -----------------------------------------------------------------------------------------------------------


def test_a_healthy_cluster_has_no_problem_and_nothing_untried() -> None:
    findings = judge_all(healthy())

    assert not has_problems(findings)
    assert [finding for finding in findings if finding.status is Status.NOT_TRIED] == []


def test_every_finding_says_what_was_seen_and_what_libra_will_do() -> None:
    for evidence in (healthy(), nothing_ran(), Evidence(mode="local", quick=True, absent="no sbatch")):
        for finding in judge_all(evidence):
            assert finding.seen
            assert finding.libra
            assert finding.probe


def test_where_nothing_ran_nothing_is_claimed_about_nodes() -> None:
    findings = judge_all(nothing_ran())

    claimed = {finding.probe for finding in findings if finding.status is not Status.NOT_TRIED}
    assert claimed == {"versions", "scheduler", "partition", "hetjob", "memory"}, "what Slurm itself says"


def test_a_measurement_that_failed_on_one_node_is_a_finding_of_its_own() -> None:
    evidence = changed(healthy(), "node1", "ports", error="OSError: no such file")

    finding = only(judge_all(evidence), "ports on node1")

    assert finding.status is Status.NOT_TRIED
    assert finding.seen == "OSError: no such file"


def test_a_measurement_that_failed_everywhere_claims_nothing() -> None:
    evidence = changed(changed(healthy(), "node1", "shm", error="e1"), "node0", "shm", error="e0")

    (finding,) = shm.judge(evidence)

    assert finding.status is Status.NOT_TRIED
    assert finding.seen == "node0: e0"


# ---- interpreter and packages -------------------------------------------------------------------------------------------------


def test_a_node_that_said_nothing_is_a_problem_with_the_words_of_its_step() -> None:
    evidence = healthy(steps={"nodes": {"said": "exit code 127; /env/python cannot be started here", "report": None}})
    evidence = replace(evidence, nodes={"node0": evidence.nodes["node0"]})

    finding = only(interpreter.judge(evidence), "nodes that answered")

    assert finding.status is Status.PROBLEM
    assert finding.seen == "node1 did not finish: exit code 127; /env/python cannot be started here"


def test_a_node_that_got_stuck_is_named_with_what_it_did() -> None:
    stuck = {"node": "node1", "rank": 1, "done": False, "doing": "bandwidth"}
    evidence = healthy()
    evidence = replace(evidence, nodes={**evidence.nodes, "node1": stuck})

    assert "'bandwidth'" in only(interpreter.judge(evidence), "nodes that answered").seen


@pytest.mark.parametrize(
    "values, name, status",
    [
        ({"digest": "old", "root": "/old"}, "the same code", Status.PROBLEM),
        ({"python": "/local/env/python"}, "the same code", Status.NOTE),
        ({"import_s": None, "import_error": "ModuleNotFoundError: x"}, "import of launch and stages", Status.PROBLEM),
        ({"import_s": 45.0}, "import of launch and stages", Status.NOTE),
    ],
)
def test_the_code_on_the_nodes_is_compared(values: dict[str, Any], name: str, status: Status) -> None:
    evidence = changed(healthy(), "node1", "interpreter", **values)

    assert only(interpreter.judge(evidence), name).status is status


def test_code_that_was_edited_meanwhile_is_not_compared() -> None:
    evidence = changed(healthy(), "node1", "interpreter", digest="new")
    here = {**evidence.here, "interpreter": {**evidence.here["interpreter"], "digest_after": "newer"}}

    finding = only(interpreter.judge(replace(evidence, here=here)), "the same code")

    assert finding.status is Status.NOT_TRIED


def test_another_python_on_a_node_is_a_problem() -> None:
    finding = only(
        packages.judge(changed(healthy(), "node1", "packages", python="3.9.1")), "Python and pickling as here"
    )

    assert finding.status is Status.PROBLEM
    assert "python 3.9.1 (here " in finding.seen


def test_nodes_with_different_versions_are_a_problem_that_names_only_these() -> None:
    finding = only(packages.judge(changed(healthy(), "node1", "packages", torch="2.9.0")), "working packages")

    assert finding.status is Status.PROBLEM
    assert finding.seen == "nodes differ: torch (node0: 2.13.0; node1: 2.9.0)"


def test_a_login_node_without_vllm_is_only_noted() -> None:
    evidence = healthy()
    here = {**evidence.here, "packages": {**evidence.here["packages"], "vllm": "absent"}}

    finding = only(packages.judge(replace(evidence, here=here)), "working packages")

    assert finding.status is Status.NOTE


def test_a_missing_package_is_a_problem() -> None:
    evidence = healthy()
    for node in evidence.nodes:
        evidence = changed(evidence, node, "packages", xxhash="absent")

    finding = only(packages.judge(evidence), "packages that a run needs")

    assert finding.status is Status.PROBLEM
    assert finding.seen == "absent: xxhash"


# ---- processors, memory, limits, shared memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seen, machine, status",
    [(4, 64, Status.OK), (64, 64, Status.NOTE), (1, 64, Status.PROBLEM), (2, 2, Status.NOTE)],
)
def test_processors_are_compared_with_what_was_asked_for(seen: int, machine: int, status: Status) -> None:
    """Equal, not confined, too few, and a test cluster that promises more than it has."""
    (finding,) = cpus.judge(changed(healthy(), "node0", "cpus", seen=seen, machine=machine))

    assert finding.status is status


def test_a_step_without_a_memory_limit_is_said_to_have_none() -> None:
    evidence = healthy()
    for node in evidence.nodes:
        evidence = changed(evidence, node, "memory", limit=0)

    assert "no limit on the step" in only(memory.judge(evidence), "memory of a step").seen


@pytest.mark.parametrize(
    "values, name, status",
    [
        ({"nofile": [1024, 1024]}, "open files", Status.PROBLEM),
        ({"nofile": [1024, -1]}, "open files", Status.OK),
        ({"memlock": [65536, 65536]}, "locked memory", Status.NOTE),
        ({"nproc": [100, 100]}, "processes", Status.NOTE),
    ],
)
def test_limits_are_judged_by_their_hard_values(values: dict[str, Any], name: str, status: Status) -> None:
    assert only(limits.judge(changed(healthy(), "node1", "limits", **values)), name).status is status


def test_little_locked_memory_matters_only_with_gpus() -> None:
    evidence = replace(changed(healthy(), "node1", "limits", memlock=[65536, 65536]), asking=GpuAsking(0))

    assert only(limits.judge(evidence), "locked memory").status is Status.OK


def test_a_small_shared_memory_and_leftovers_are_noted() -> None:
    evidence = changed(healthy(), "node1", "shm", total=64 << 20, free=64 << 20, leftovers=["/tmp/libra-0-abc"])
    findings = shm.judge(evidence)

    assert only(findings, "/dev/shm").status is Status.NOTE
    assert only(findings, "leftovers of earlier runs").seen == "1: /tmp/libra-0-abc"
