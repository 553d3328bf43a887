"""Collectives of torch between the GPUs (NCCL), or, on nodes without GPUs, between the nodes (gloo)."""

from __future__ import annotations

from launch.doctor.evidence import Evidence, Report
from launch.doctor.finding import Finding, not_tried, ok, problem
from launch.doctor.wording import rate, size

PROGRAM = "collective"
NODE = "inside a node"
NETWORK = "between nodes"


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
    return [_measured(title, found, where) for where in (NODE, NETWORK) if where in found["bus_bytes_per_s"]]


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


def _measured(title: str, found: Report, where: str) -> Finding:
    seen = (
        f"{rate(found['bus_bytes_per_s'][where])} bus bandwidth {where}, {found['ranks']} ranks,"
        f" {size(found['bytes'])} a call; sums are right"
    )
    if found["backend"] == "nccl":
        option = "hardware.link_bytes_per_s" if where == NODE else "hardware.network_bytes_per_s"
        return ok(title, seen, f"plan with it ({option} in the profile)")
    return ok(title, seen, "train on processors through it; the profile takes nothing from it")
