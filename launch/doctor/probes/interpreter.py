"""Whether the nodes can start Libra's Python at all, import Libra from the same place, and how long that takes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import launch
from launch.doctor.evidence import Evidence, Report
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.inside.meeting import Scene
from launch.doctor.wording import by_value, nodes, seconds

KEY = "interpreter"
ROOT = Path(launch.__file__).parents[1]
CODE = ("launch", "planner", "stages", "conf", "traces")
IMPORTS = "import launch.supervise, stages.entry"
"""What the supervisor and every step import first; neither needs torch."""
SLOW_IMPORT_S = 20.0


def measure(scene: Scene) -> dict[str, Any]:
    """`import_s` is None when the import failed or took too long; then `import_error` is what Python said last."""
    started_s = time.monotonic()
    error = _import_error(scene.order.limits.import_s)
    took_s = time.monotonic() - started_s
    return {**place(), "import_s": None if error else took_s, "import_error": error}


def _import_error(deadline_s: float) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not over after {deadline_s:g} s"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def place() -> dict[str, str]:
    return {"python": sys.executable, "root": str(ROOT), "digest": code_digest(ROOT)}


def code_digest(root: Path) -> str:
    """Of names and sizes of the Python files: an old copy of the code shows, without reading all of it over the network."""
    sizes = [
        f"{path.relative_to(root)} {path.stat().st_size}"
        for name in CODE
        for path in sorted((root / name).rglob("*.py"))
    ]
    return hashlib.sha256("\n".join(sizes).encode()).hexdigest()[:16]


def judge(evidence: Evidence) -> list[Finding]:
    answers = evidence.answers(KEY)
    found = [_answered(evidence)] if evidence.mode == "slurm" else []
    if not answers:
        return [*found, not_tried("Libra on the nodes", evidence.why_not(KEY), "find out with the first run")]
    return [*found, _place(answers, evidence.here.get(KEY, {})), _imports(answers)]


def _answered(evidence: Evidence) -> Finding:
    """Every node of the job has to tell something; what it is that stopped it comes from srun and the step's log."""
    name = "nodes that answered"
    if not evidence.job.nodes:
        return not_tried(name, evidence.no_step, "say the same of a run's job")
    finished = [node for node, report in evidence.nodes.items() if report.get("done")]
    silent = [node for node in evidence.job.nodes if node not in finished]
    if not silent:
        return ok(name, f"{nodes(finished)}", "start steps on them")
    why = _why_silent(evidence, silent)
    return problem(name, f"{nodes(silent)} did not finish: {why}", "fail there too; mend it, or leave the node out")


def _why_silent(evidence: Evidence, silent: list[str]) -> str:
    doing = [str(evidence.nodes[node].get("doing")) for node in silent if node in evidence.nodes]
    if doing:
        return f"stuck in or ended by '{doing[0]}'"
    said = str(evidence.steps.get("nodes", {}).get("said", ""))
    return said or evidence.job.trouble or "nothing is known"


def _place(answers: Mapping[str, Report], here: Report) -> Finding:
    name = "the same code"
    if here.get("digest") != here.get("digest_after", here.get("digest")):
        return not_tried(name, "files were changed while the doctor ran", "run what is there when a step starts")
    other = {
        node: f"{facts['python']}, Libra in {facts['root']}"
        for node, facts in answers.items()
        if _is_other(facts, here)
    }
    if not other:
        return ok(name, f"{here.get('python')}, Libra in {here.get('root')}", "run it on every node")
    if all(answers[node]["digest"] == here.get("digest") for node in other):
        return note(
            name, f"{by_value(other)} (here {here.get('python')}, {here.get('root')})", "run it: the files are alike"
        )
    return problem(
        name, f"other files on {by_value(other)}", "run another version there than the one that planned; use one folder"
    )


def _is_other(facts: Report, here: Report) -> bool:
    return any(facts[key] != here.get(key) for key in ("python", "root", "digest"))


def _imports(answers: Mapping[str, Report]) -> Finding:
    name = "import of launch and stages"
    failed = {node: str(facts["import_error"]) for node, facts in answers.items() if facts["import_s"] is None}
    if failed:
        return problem(name, by_value(failed), "fail at the start of every step; mend the environment")
    slowest_s = max(facts["import_s"] for facts in answers.values())
    if slowest_s > SLOW_IMPORT_S:
        return note(name, f"up to {seconds(slowest_s)}", "start slowly; put the environment on a faster filesystem")
    return ok(name, f"up to {seconds(slowest_s)}", "start every step so")
