"""Whether Slurm shares out memory, and how much a step may use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, not_tried, note, ok
from launch.doctor.inside.meeting import Scene
from launch.doctor.wording import by_value, size

KEY = "memory"
CGROUPS = Path("/sys/fs/cgroup")


def measure(_scene: Scene) -> dict[str, Any]:
    """Bytes. `limit`: the tightest memory limit of the step's control groups; 0 when there is none."""
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    return {
        "machine": int(total.split()[1]) * 1024,
        "limit": cgroup_limit(Path("/proc/self/cgroup").read_text(), CGROUPS),
    }


def cgroup_limit(own: str, root: Path) -> int:
    """`own` is /proc/self/cgroup: "0::/path" for version 2, "9:memory:/path" for version 1. Limits above count as well."""
    limits = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        place = base / path.lstrip("/")
        for folder in (place, *place.parents):
            limits += _limit_in(folder / name)
            if folder == base:
                break
    return min(limits, default=0)


def _limit_in(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    no_limit = not text.isdigit() or int(text) >= 1 << 60  # version 1 writes a number near 2**63
    return [] if no_limit else [int(text)]


def judge(evidence: Evidence) -> list[Finding]:
    return [*_sharing(evidence), *_limits(evidence)]


def _sharing(evidence: Evidence) -> list[Finding]:
    facts = evidence.slurm
    if facts is None or not facts.config:
        return []
    kinds = facts.config.get("SelectTypeParameters", "").upper()
    if "MEMORY" in kinds:
        libra = "ask for slurm.mem_per_node_bytes (0: all of a node) and let the steps share it (--mem=0)"
        return [ok("memory is shared out", kinds, libra)]
    return [
        note(
            "memory is shared out",
            f"no ({kinds or 'unknown'})",
            "ask for memory all the same; other jobs on a node may take it",
        )
    ]


def _limits(evidence: Evidence) -> list[Finding]:
    name = "memory of a step"
    answers = evidence.answers(KEY)
    if not answers:
        return [not_tried(name, evidence.why_not(KEY), "check only what the plan predicts")]
    texts = {node: f"{size(facts['machine'])} in the node, {_limit(facts['limit'])}" for node, facts in answers.items()}
    limited = all(facts["limit"] for facts in answers.values())
    libra = (
        "be killed (OUT_OF_MEMORY) beyond the limit"
        if limited
        else "be able to fill the node, and then fail as a whole"
    )
    return [ok(name, by_value(texts), libra)]


def _limit(limit: int) -> str:
    return f"limited to {size(limit)}" if limit else "no limit on the step"
