"""What the doctor makes of GPUs: those that Slurm counts, those that nodes show, and those that steps see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launch.doctor.evidence import Evidence, GpuAsking, JobStory
from launch.doctor.finding import Finding, Status
from launch.doctor.probes import gpus
from tests.doctor_kit import card, changed, healthy, only, step_report

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
