"""One file per noun: `judge` turns evidence into findings, purely; `measure`, where there is one, runs on every node.

In the order in which they are shown and measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, not_tried
from launch.doctor.inside.meeting import Scene
from launch.doctor.probes import (
    bandwidth,
    clock,
    collective,
    cpus,
    engine,
    filesystem,
    gpus,
    hetjob,
    interpreter,
    job,
    limits,
    memory,
    packages,
    partition,
    ports,
    scheduler,
    sharing,
    shm,
    versions,
)

PROBES: tuple[ModuleType, ...] = (
    versions,
    scheduler,
    partition,
    hetjob,
    job,
    interpreter,
    packages,
    cpus,
    memory,
    gpus,
    limits,
    shm,
    ports,
    filesystem,
    sharing,
    bandwidth,
    clock,
    collective,
    engine,
)
MEASURES: tuple[tuple[str, Callable[[Scene], dict[str, Any]]], ...] = tuple(
    (probe.KEY, probe.measure) for probe in PROBES if hasattr(probe, "measure")
)


def judge_all(evidence: Evidence) -> list[Finding]:
    """Every finding, with the probe's name. A measurement that failed on some nodes only is a finding of its own."""
    return [finding for probe in PROBES for finding in _findings(probe, evidence)]


def _findings(probe: ModuleType, evidence: Evidence) -> Iterator[Finding]:
    name = probe.__name__.rpartition(".")[2]
    for finding in probe.judge(evidence):
        yield replace(finding, probe=name)
    key = getattr(probe, "KEY", "")
    if evidence.answers(key):
        for node, error in evidence.errors(key).items():
            yield replace(not_tried(f"{name} on {node}", error, "treat this node as the others"), probe=name)
