"""What the doctor makes of measurements on the nodes: one healthy cluster, and one thing at a time that is wrong with it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from launch.doctor.evidence import Evidence, GpuAsking, JobStory
from launch.doctor.finding import Finding, Status, has_problems
from launch.doctor.probes import (
    bandwidth,
    clock,
    collective,
    cpus,
    engine,
    filesystem,
    gpus,
    interpreter,
    judge_all,
    limits,
    memory,
    packages,
    ports,
    sharing,
    shm,
)
from tests.doctor_kit import card, changed, healthy, only, step_report

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


# ---- GPUs ----------------------------------------------------------------------------------------------------------------------


def judged(evidence: Evidence, name: str) -> Finding:
    return only(gpus.judge(evidence), name)


def test_cards_are_named_with_memory_and_driver() -> None:
    assert judged(healthy(), "GPUs").seen == "2 x NVIDIA H200 with 150.8 GB, driver 580.159.04"


def test_cards_that_differ_are_noted() -> None:
    evidence = changed(healthy(), "node1", "gpus", cards=[card(0), card(1, memory_bytes=80 * 2**30)])

    assert judged(evidence, "GPUs").status is Status.NOTE


def without_cards(evidence: Evidence, **values: Any) -> Evidence:
    for node in evidence.nodes:
        evidence = changed(evidence, node, "gpus", cards=[], no_cards="nvidia-smi: No such file or directory", **values)
    return evidence


def test_gpus_that_only_slurm_knows_are_said_to_be_slurms_count() -> None:
    finding = judged(without_cards(healthy()), "GPUs")

    assert finding.status is Status.NOTE
    assert "Slurm gives 2 to each node" in finding.seen


@pytest.mark.parametrize(
    "asking, job, status",
    [
        (GpuAsking(2), JobStory(7, "COMPLETED"), Status.OK),
        (GpuAsking(2, "gres", "gpus-per-node", {"gpus-per-node": "Invalid TRES"}), JobStory(7, "RUNNING"), Status.NOTE),
        (GpuAsking(0, "none", "gpus-per-node", {"gpus-per-node": "Invalid gres"}), JobStory(7, "RUNNING"), Status.NOTE),
        (GpuAsking(2, refused={"gpus-per-node": "no", "gres": "no"}), JobStory(state="REFUSED"), Status.NOT_TRIED),
        (GpuAsking(2), JobStory(state="REFUSED", trouble="no account"), Status.NOT_TRIED),
    ],
)
def test_the_way_to_ask_for_gpus_is_what_sbatch_took(asking: GpuAsking, job: JobStory, status: Status) -> None:
    finding = judged(healthy(asking=asking, job=job), "how a job asks for GPUs")

    assert finding.status is status
    assert asking.configured == asking.flag or f"slurm.gpu_flag={asking.flag} is set" in finding.libra


def test_a_step_that_does_not_see_its_gpus_is_a_problem() -> None:
    """gres.conf without device files: CUDA_VISIBLE_DEVICES stays as Libra set it, empty (facts of 22.05)."""
    finding = judged(without_cards(healthy(), visible=""), "--gpus-per-node=2")

    assert finding.status is Status.PROBLEM
    assert "(empty)" in finding.seen


def test_an_unset_variable_counts_the_cards_that_the_step_sees() -> None:
    evidence = healthy()
    for node in evidence.nodes:
        evidence = changed(evidence, node, "gpus", visible=None)

    assert judged(evidence, "--gpus-per-node=2").status is Status.OK


def test_another_syntax_that_works_is_named() -> None:
    evidence = healthy(
        nodes={}, steps={"side_a": {"said": "exit code 1", "report": None}, "other_gres": step_report("0")}
    )

    finding = judged(evidence, "--gpus-per-node=2")

    assert finding.status is Status.PROBLEM
    assert "--gres=gpu:1 did" in finding.seen


def test_a_step_without_gpus_that_sees_one_is_noted() -> None:
    evidence = healthy()
    steps = {**evidence.steps, "side_cpu": step_report("0")}

    assert judged(replace(evidence, steps=steps), "--gpus-per-node=0").status is Status.NOTE


def pair(first: str, second: str, *cards: tuple[dict[str, Any], ...]) -> Evidence:
    own = cards or ((), ())
    steps = {"side_a": step_report(first, cards=own[0]), "side_b": step_report(second, cards=own[1])}
    return healthy(steps={**steps, "side_cpu": step_report(None)})


def test_steps_side_by_side_with_different_numbers_have_different_gpus() -> None:
    finding = judged(pair("0", "1"), "steps side by side")

    assert finding.status is Status.OK
    assert "numbered over the node" in finding.seen


def test_equal_numbers_of_different_cards_are_different_gpus() -> None:
    """Where cgroups confine devices every step counts from 0."""
    finding = judged(pair("0", "0", (card(0, uuid="GPU-a"),), (card(0, uuid="GPU-b"),)), "steps side by side")

    assert finding.status is Status.OK
    assert "numbered from 0 in each step" in finding.seen


def test_equal_numbers_of_the_same_card_are_a_problem() -> None:
    same = (card(0), card(1))

    assert judged(pair("0", "0", same, same), "steps side by side").status is Status.PROBLEM


def test_equal_numbers_without_nvidia_smi_claim_nothing() -> None:
    assert judged(pair("0", "0"), "steps side by side").status is Status.NOT_TRIED


def test_steps_that_see_no_gpu_are_a_problem() -> None:
    assert judged(pair("", ""), "steps side by side").status is Status.PROBLEM


def test_steps_that_waited_for_each_other_are_a_problem() -> None:
    evidence = healthy(steps={"side_a": step_report("0", together=False), "side_b": step_report("1")})

    assert "one after another" in judged(evidence, "steps side by side").seen


def test_a_step_that_did_not_start_is_a_problem_with_its_words() -> None:
    evidence = healthy(
        steps={"side_a": step_report("0"), "side_b": {"said": "exit code 1; Unable to create step", "report": None}}
    )

    finding = judged(evidence, "steps side by side")

    assert finding.status is Status.PROBLEM
    assert "Unable to create step" in finding.seen


def test_nodes_without_gpus_still_start_steps_side_by_side() -> None:
    evidence = without_cards(
        healthy(asking=GpuAsking(0), steps={"side_a": step_report(None), "side_b": step_report(None)})
    )
    findings = gpus.judge(evidence)

    assert only(findings, "GPUs").status is Status.NOTE
    assert only(findings, "GPUs of a step").status is Status.NOT_TRIED
    assert only(findings, "steps side by side").status is Status.OK


def test_nvidia_smi_is_read_as_recorded() -> None:
    """Two H200; the third line is made after nvidia-smi's manual (a field that a driver does not tell)."""
    text = (
        "0, GPU-1971afd1-31ca-6c0a-72a9-95a8825ecc79, NVIDIA H200, 143771, 580.159.04\n"
        "1, GPU-a0c479a6-30f4-a3ad-c3b4-9d5efdd793f4, NVIDIA H200, 143771, 580.159.04\n"
        "2, GPU-2, NVIDIA H200, [N/A], 580.159.04\n"
        "No devices were found\n"
    )

    assert gpus.parse_cards(text) == [
        card(0, uuid="GPU-1971afd1-31ca-6c0a-72a9-95a8825ecc79"),
        card(1, uuid="GPU-a0c479a6-30f4-a3ad-c3b4-9d5efdd793f4"),
        card(2, memory_bytes=0),
    ]


# ---- ports, files, clocks --------------------------------------------------------------------------------------------------------


def test_a_node_that_cannot_be_reached_is_a_problem() -> None:
    evidence = changed(healthy(), "node1", "ports", reached={"address": "timed out", "name": ""})
    findings = ports.judge(evidence)

    assert only(findings, "nodes reach one another").status is Status.PROBLEM
    assert "timed out" in only(findings, "nodes reach one another").seen
    assert only(findings, "nodes know one another's names").status is Status.OK


def test_a_node_without_an_address_is_a_problem_for_several_nodes() -> None:
    evidence = changed(healthy(), "node1", "ports", address="", no_address="host n has no address", reached={})

    assert only(ports.judge(evidence), "ports").status is Status.PROBLEM


def test_one_node_alone_was_not_reached_by_others() -> None:
    evidence = healthy()
    evidence = replace(evidence, nodes={"node0": evidence.nodes["node0"]})

    assert only(ports.judge(evidence), "nodes reach one another").status is Status.NOT_TRIED


@pytest.mark.parametrize(
    "values, name, status",
    [
        ({"kind": "ext4"}, "filesystem of the run root", Status.NOTE),
        ({"kind": "lustre"}, "filesystem of the run root", Status.OK),
        ({"free": 2e8}, "room on the run root", Status.PROBLEM),
        ({"free": 2e10}, "room on the run root", Status.NOTE),
        ({"files": 50}, "room on the run root", Status.PROBLEM),
        ({"publish_s": 0.8}, "publishing a record", Status.NOTE),
    ],
)
def test_the_filesystem_is_judged(values: dict[str, Any], name: str, status: Status) -> None:
    assert only(filesystem.judge(changed(healthy(), "node1", "filesystem", **values)), name).status is status


def seen_by_node0(**found: float | None) -> Evidence:
    return changed(healthy(), "node0", "sharing", seen=[{"writer": 1, "listed_s": 0.02, "lag_s": 0.0, **found}])


@pytest.mark.parametrize(
    "found, name, status",
    [
        ({"listed_s": 12.0}, "seen by other nodes", Status.OK),
        ({"listed_s": None, "lag_s": None}, "seen by other nodes", Status.PROBLEM),
        ({"listed_s": None, "lag_s": None}, "exists() after a miss", Status.NOT_TRIED),
        ({"lag_s": 29.0}, "exists() after a miss", Status.NOTE),
        ({"lag_s": None}, "exists() after a miss", Status.NOTE),
    ],
)
def test_visibility_between_nodes_is_judged(found: dict[str, float | None], name: str, status: Status) -> None:
    assert only(sharing.judge(seen_by_node0(**found)), name).status is status


def test_a_name_with_two_winners_is_a_problem() -> None:
    evidence = changed(healthy(), "node1", "sharing", won=list(range(9, 20)))

    finding = only(sharing.judge(evidence), "exclusive creation")

    assert finding.status is Status.PROBLEM
    assert "of 20 names 1 had several winners" in finding.seen


@pytest.mark.parametrize("values, status", [({"torn": 1}, Status.PROBLEM), ({"last": 12}, Status.NOTE)])
def test_a_torn_record_is_a_problem_and_an_old_one_is_noted(values: dict[str, int], status: Status) -> None:
    evidence = changed(healthy(), "node1", "sharing", **values)

    assert only(sharing.judge(evidence), "replacing a record").status is status


def test_bandwidth_is_said_for_each_number_of_threads_in_order() -> None:
    finding = only(bandwidth.judge(healthy()), "write bandwidth of the run root")

    assert finding.seen.startswith("1.0 GB/s with 1, 2.0 GB/s with 4, 3.0 GB/s with 16 threads")
    assert finding.libra == "write the weights of a 7B model in about 5.1 s at best"


def test_a_small_file_is_said_to_be_small() -> None:
    assert "a cache may answer" in bandwidth.judge(healthy(quick=True))[0].seen


@pytest.mark.parametrize(
    "offset_s, uncertainty_s, status", [(0.002, 0.001, Status.OK), (-7.5, 0.1, Status.NOTE), (2.0, 5.0, Status.OK)]
)
def test_a_clock_is_noted_only_beyond_what_is_uncertain(offset_s: float, uncertainty_s: float, status: Status) -> None:
    evidence = changed(healthy(), "node1", "clock", offset_s=offset_s, uncertainty_s=uncertainty_s)

    (finding,) = clock.judge(evidence)

    assert finding.status is status
    assert "node1" in finding.seen


# ---- programs ------------------------------------------------------------------------------------------------------------------


def with_program(name: str, **values: Any) -> Evidence:
    evidence = healthy()
    return replace(evidence, programs={**evidence.programs, name: {**evidence.programs[name], **values}})


def test_nccl_rates_are_compared_with_their_options() -> None:
    findings = collective.judge(healthy())

    assert [finding.status for finding in findings] == [Status.OK, Status.OK]
    assert "361.2 GB/s bus bandwidth inside a node" in findings[0].seen
    assert "80% of hardware.link_bytes_per_s=4.5e+11" in findings[0].seen
    assert "84% of hardware.network_bytes_per_s=5e+10" in findings[1].seen
    assert collective.corrected_rates(healthy()) == {}


@pytest.mark.parametrize("measured", [2.2e10, 6e11])
def test_a_rate_that_cannot_be_the_configured_hardware_s_is_corrected(measured: float) -> None:
    evidence = with_program("collective", bus_bytes_per_s={"inside a node": measured})

    (finding,) = collective.judge(evidence)

    assert finding.status is Status.NOTE
    assert collective.corrected_rates(evidence) == {"hardware.link_bytes_per_s": measured}


def test_gloo_is_not_called_nccl() -> None:
    evidence = with_program("collective", backend="gloo", bus_bytes_per_s={"between nodes": 1e9})

    (finding,) = collective.judge(evidence)

    assert finding.name == "gloo all-reduce (no GPU: NCCL was not tried)"
    assert "the profile takes nothing from it" in finding.libra


def test_a_collective_that_failed_is_a_problem() -> None:
    (finding,) = collective.judge(with_program("collective", error="rank 3: unhandled system error"))

    assert finding.status is Status.PROBLEM
    assert "unhandled system error" in finding.seen


@pytest.mark.parametrize(
    "step, status",
    [
        ({"skipped": "no GPU on one node"}, Status.NOT_TRIED),
        ({"said": "not over after 420 s"}, Status.PROBLEM),
        (None, Status.NOT_TRIED),
    ],
)
def test_a_collective_without_a_report_is_judged_by_its_step(step: dict[str, str] | None, status: Status) -> None:
    evidence = healthy(programs={}, steps={} if step is None else {"collective": step})

    (finding,) = collective.judge(evidence)

    assert finding.status is status


def test_reloaded_weights_with_the_same_log_probs_are_fine() -> None:
    assert {finding.status for finding in engine.judge(healthy())} == {Status.OK}


@pytest.mark.parametrize("found", [0.42, math.inf, math.nan])
def test_a_reload_that_changes_the_log_probs_is_a_problem(found: float) -> None:
    evidence = with_program("engine", differences={"after the same weights": 0.0, "after others and back": found})

    finding = only(engine.judge(evidence), engine.IDENTITY)

    assert finding.status is Status.PROBLEM
    assert "rollout_weight_reload_method=restart" in finding.libra


def test_a_reload_that_changes_nothing_is_a_problem() -> None:
    finding = only(engine.judge(with_program("engine", moved=0.0)), engine.IDENTITY)

    assert finding.status is Status.PROBLEM
    assert "changes nothing" in finding.seen


def test_an_engine_that_failed_is_a_problem_with_its_words() -> None:
    (finding,) = engine.judge(with_program("engine", error="VllmStartError: no", stage="starting the server"))

    assert finding.status is Status.PROBLEM
    assert finding.seen == "starting the server: VllmStartError: no"


def test_the_quick_mode_tries_neither_program() -> None:
    evidence = healthy(programs={}, quick=True)

    assert [finding.status for finding in (*collective.judge(evidence), *engine.judge(evidence))] == [
        Status.NOT_TRIED
    ] * 2
