"""Resource limits of the shell, which Slurm passes on or replaces."""

from __future__ import annotations

import resource
from typing import Any

from launch.doctor.evidence import Evidence, Report
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.inside.meeting import Scene
from launch.doctor.wording import by_value, size

KEY = "limits"
FEWEST_FILES = 4096
FEWEST_PROCESSES = 4096
INFINITE = -1
"""RLIM_INFINITY."""


def measure(_scene: Scene) -> dict[str, Any]:
    """Soft and hard limit of each; -1 is unlimited. Memory in bytes."""
    return {
        "nofile": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "memlock": list(resource.getrlimit(resource.RLIMIT_MEMLOCK)),
        "nproc": list(resource.getrlimit(resource.RLIMIT_NPROC)),
    }


def judge(evidence: Evidence) -> list[Finding]:
    answers = evidence.answers(KEY)
    if not answers:
        return [not_tried("limits", evidence.why_not(KEY), "raise soft limits to hard ones where it can")]
    return [_files(answers), _locked(answers, evidence), _processes(answers)]


def _files(answers: dict[str, Report]) -> Finding:
    seen = by_value(
        {node: f"{_count(f['nofile'][0])}, at most {_count(f['nofile'][1])}" for node, f in answers.items()}
    )
    if any(_is_below(facts["nofile"][1], FEWEST_FILES) for facts in answers.values()):
        return problem("open files", seen, f"run out of them: at least {FEWEST_FILES} are needed (ulimit -Hn)")
    return ok("open files", seen, "raise the soft limit to the hard one in every vLLM server")


def _locked(answers: dict[str, Report], evidence: Evidence) -> Finding:
    seen = by_value({node: _bytes(facts["memlock"][1]) for node, facts in answers.items()})
    limited = any(facts["memlock"][1] != INFINITE for facts in answers.values())
    if limited and evidence.asking.count:
        return note(
            "locked memory",
            f"at most {seen}",
            "not raise it; NCCL over InfiniBand wants unlimited: ask for that (ulimit -l, PropagateResourceLimits)",
        )
    return ok("locked memory", seen, "need it only for NCCL over InfiniBand")


def _processes(answers: dict[str, Report]) -> Finding:
    seen = by_value({node: _count(facts["nproc"][1]) for node, facts in answers.items()})
    if any(_is_below(facts["nproc"][1], FEWEST_PROCESSES) for facts in answers.values()):
        return note("processes", f"at most {seen} for this user", "count threads too: vLLM and torch start hundreds")
    return ok("processes", seen, "start a few hundred processes and threads on a node")


def _is_below(limit: int, least: int) -> bool:
    return limit != INFINITE and limit < least


def _count(limit: int) -> str:
    return "unlimited" if limit == INFINITE else str(limit)


def _bytes(limit: int) -> str:
    return "unlimited" if limit == INFINITE else size(limit)
