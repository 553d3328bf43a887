"""Collectives of torch between the GPUs (NCCL), or, on nodes without GPUs, between the nodes (gloo)."""

from __future__ import annotations

from collections.abc import Mapping

from launch.doctor.evidence import Evidence, Report
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.wording import rate, size

PROGRAM = "collective"
NODE = "inside a node"
NETWORK = "between nodes"
RATES = {NODE: "hardware.link_bytes_per_s", NETWORK: "hardware.network_bytes_per_s"}
LEAST_SHARE = 0.5
"""NCCL reaches 60 to 90 % of a link with large buffers (64 % of the 450 GB/s of two H200, measured). Below this the option
describes other hardware. What NCCL reached does not replace a rate that can be right: the planner takes its own share of it."""


def judge(evidence: Evidence) -> list[Finding]:
    found = evidence.programs.get(PROGRAM)
    if found is None:
        return [_absent(evidence)]
    title = "NCCL all-reduce" if found["backend"] == "nccl" else "gloo all-reduce (no GPU: NCCL was not tried)"
    if found.get("error"):
        return [
            problem(
                title,
                str(found["error"]),
                "not be able to train over these nodes; NCCL_DEBUG=INFO in launch.setup says more",
            )
        ]
    return [
        _measured(title, found, where, evidence.configured)
        for where in (NODE, NETWORK)
        if where in found["bus_bytes_per_s"]
    ]


def _absent(evidence: Evidence) -> Finding:
    if evidence.quick:
        return not_tried("all-reduce", "--quick", "find out with the first run")
    step = evidence.steps.get(PROGRAM)
    if step is not None:
        if step.get("skipped"):
            return not_tried("all-reduce", str(step["skipped"]), "find out with the first run")
        return problem(
            "all-reduce", str(step.get("said")), "not be able to train over these nodes; the words above say why"
        )
    return not_tried("all-reduce", evidence.no_step, "find out with the first run")


def _measured(title: str, found: Report, where: str, configured_rates: Mapping[str, float]) -> Finding:
    seen = (
        f"{rate(found['bus_bytes_per_s'][where])} bus bandwidth {where}, {found['ranks']} ranks,"
        f" {size(found['bytes'])} a call; sums are right"
    )
    if found["backend"] != "nccl":
        return ok(title, seen, "train on processors through it; the profile takes nothing from it")
    option = RATES[where]
    configured = configured_rates.get(option)
    if configured is None:
        return ok(title, seen, f"plan with {option}")
    share = f"{found['bus_bytes_per_s'][where] / configured:.0%} of {option}={configured:g}"
    if is_other(found["bus_bytes_per_s"][where], configured):
        return note(
            title, f"{seen}; {share}", f"plan with what was measured ({option} in the profile); choose hardware=..."
        )
    return ok(title, f"{seen}; {share}", f"plan with {option} as configured, of which it takes its own share")


def is_other(measured: float, configured: float) -> bool:
    """Can `configured` not be the rate of this hardware?"""
    return measured < LEAST_SHARE * configured or measured > configured


def corrected_rates(evidence: Evidence) -> dict[str, float]:
    """Option -> measured rate, where the configured one cannot be right."""
    found = evidence.programs.get(PROGRAM, {})
    if found.get("backend") != "nccl" or found.get("error"):
        return {}
    measured = {RATES[where]: float(value) for where, value in found["bus_bytes_per_s"].items()}
    return {
        option: value for option, value in measured.items() if is_other(value, evidence.configured.get(option, value))
    }
