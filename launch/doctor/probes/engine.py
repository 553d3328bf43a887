"""A real vLLM server of the product: does it start, and do reloaded weights give the same log-probs?"""

from __future__ import annotations

import math

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, not_tried, ok, problem
from launch.doctor.wording import seconds

PROGRAM = "engine"
IDENTITY = "reloading the same weights"


def judge(evidence: Evidence) -> list[Finding]:
    found = evidence.programs.get(PROGRAM)
    if found is None:
        return [_absent(evidence)]
    version = found.get("vllm", "vLLM")
    if found.get("error"):
        libra = "not be able to generate here; the server's own words are in front"
        return [problem(f"{version} with {found['model']}", f"{found['stage']}: {found['error']}", libra)]
    start = ok(
        f"{version} with {found['model']}",
        f"ready {seconds(found['start_s'])} after its start, on {found['device']}",
        f"allow {seconds(found['ready_timeout_s'])} for a real model (rollout.ready_timeout_s)",
    )
    return [start, _identity(found["differences"], found["tolerance"], found["moved"], found["reload_s"])]


def _identity(differences: dict[str, float], tolerance: float, moved: float, reload_s: float) -> Finding:
    """`moved`: how far other weights moved the same log-probs. Without that an engine that ignores reloads would pass."""
    listed = ", ".join(f"{what} {_nats(value)}" for what, value in differences.items())
    seen = (
        f"log-probs: {listed}; allowed {tolerance:g} nats; other weights: {_nats(moved)}; {seconds(reload_s)} a reload"
    )
    if not all(value <= tolerance for value in differences.values()):  # also for NaN
        return problem(IDENTITY, seen, "refuse every in-place reload here; use rollout_weight_reload_method=restart")
    if not moved > tolerance:
        return problem(IDENTITY, f"{seen}: the reload changes nothing", "refuse every in-place reload here")
    return ok(IDENTITY, seen, "reload in place, and prove every version before it is served")


def _nats(value: float) -> str:
    return "other tokens" if math.isinf(value) else f"differ by {value:.2g}"


def _absent(evidence: Evidence) -> Finding:
    name = "vLLM start and reload"
    if evidence.quick:
        return not_tried(name, "--quick", "prove every version of the weights in the run itself")
    step = evidence.steps.get(PROGRAM)
    if step is not None:
        return problem(
            name, str(step.get("said") or "the program left no word"), "probably not be able to generate here"
        )
    return not_tried(name, evidence.no_step, "find out with the first run")
