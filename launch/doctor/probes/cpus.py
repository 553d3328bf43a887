"""How many processors a step sees, against how many it asked for."""

from __future__ import annotations

import os
from typing import Any

from launch.doctor.evidence import Evidence, Report
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.inside.meeting import Scene
from launch.doctor.wording import by_value

KEY = "cpus"
NAME = "processors of a step"


def measure(scene: Scene) -> dict[str, Any]:
    """`seen`: sched_getaffinity(2). `machine`: all that the kernel has. `told`: SLURM_CPUS_PER_TASK, "" when unset."""
    return {
        "seen": len(os.sched_getaffinity(0)),
        "machine": os.cpu_count() or 0,
        "told": os.environ.get("SLURM_CPUS_PER_TASK", ""),
        "asked": scene.order.step_cpus,
    }


def judge(evidence: Evidence) -> list[Finding]:
    answers = evidence.answers(KEY)
    if not answers:
        return [not_tried(NAME, evidence.why_not(KEY), "pass --cpus-per-task to every step")]
    if evidence.mode == "local":
        seen = by_value({node: f"{facts['seen']} of {facts['machine']}" for node, facts in answers.items()})
        return [ok(NAME, f"{seen} may be used", "divide them between the stages of a local run")]
    seen = by_value({node: _text(facts) for node, facts in answers.items()})
    if any(_is_short(facts) for facts in answers.values()):
        return [
            problem(
                NAME, seen, "have ranks wait for one another: --cpus-per-task is not honoured; ask the administrators"
            )
        ]
    if any(facts["seen"] < facts["asked"] for facts in answers.values()):
        return [
            note(
                NAME,
                f"{seen}: Slurm promises more than there are",
                "share the real ones; only a test cluster does this",
            )
        ]
    if any(facts["seen"] > facts["asked"] for facts in answers.values()):
        return [note(NAME, f"{seen}: not confined", "set OMP_NUM_THREADS to what each stage asked for")]
    return [ok(NAME, seen, "pass --cpus-per-task to every step and trust it")]


def _text(facts: Report) -> str:
    told = facts["told"] or "unset"
    return f"asked for {facts['asked']}, sees {facts['seen']} of {facts['machine']} (SLURM_CPUS_PER_TASK {told})"


def _is_short(facts: Report) -> bool:
    return bool(facts["seen"] < facts["asked"] <= facts["machine"])
