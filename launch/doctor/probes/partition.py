"""The nodes that jobs would get."""

from __future__ import annotations

from collections import Counter

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.slurm_facts import NodeFacts, PartitionFacts, SlurmFacts
from launch.doctor.wording import nodes, size

UNLIMITED = ("UNLIMITED", "INFINITE", "infinite", "")


def judge(evidence: Evidence) -> list[Finding]:
    facts = evidence.slurm
    if facts is None:
        return []
    partition = facts.partition
    if partition is None:
        return [_no_partition(facts)]
    if not facts.nodes:
        return [not_tried("partition", f"{partition.name} has no nodes that Slurm shows", "not be able to plan for it")]
    return [_state(facts, partition), _shapes(facts), _limits(partition)]


def _no_partition(facts: SlurmFacts) -> Finding:
    if facts.trouble or not facts.partitions:
        return not_tried("partition", facts.trouble or "Slurm shows none", "ask for none; set slurm.partition")
    names = ", ".join(facts.partitions)
    return problem(
        "partition",
        f"not one of {names}, or no default one",
        f"be refused by sbatch; set slurm.partition to one of {names}",
    )


def _state(facts: SlurmFacts, partition: PartitionFacts) -> Finding:
    states = ", ".join(f"{count} {state}" for state, count in Counter(node.state for node in facts.nodes).items())
    seen = f"{partition.name}: {states}"
    if partition.state not in ("UP", ""):
        return problem("partition", f"{seen}; the partition is {partition.state}", "have its jobs wait until it is UP")
    if not facts.usable:
        return problem("partition", seen, "have its jobs wait: no node takes work")
    return ok("partition", seen, "refuse plans with more nodes than Slurm accepts (sbatch --test-only)")


def _shapes(facts: SlurmFacts) -> Finding:
    """Nodes of one partition may differ; then only the least can be promised."""
    groups: dict[str, list[NodeFacts]] = {}
    for node in facts.nodes:
        groups.setdefault(_shape(node), []).append(node)
    if len(groups) == 1:
        return ok("nodes", f"{len(facts.nodes)} alike: {next(iter(groups))}", "plan with this shape (hardware.*)")
    seen = "; ".join(f"{nodes(node.name for node in alike)}: {shape}" for shape, alike in groups.items())
    return note("nodes", seen, "plan with the smallest; choose one kind with slurm.partition or slurm.constraint")


def _shape(node: NodeFacts) -> str:
    gpus = node.gres or "no GPUs"
    return f"{node.cpus} processors, {size(node.memory_bytes)}, {gpus}"


def _limits(partition: PartitionFacts) -> Finding:
    time, count = partition.max_time, partition.max_nodes
    seen = f"time {'unlimited' if time in UNLIMITED else time}, nodes {'unlimited' if count in UNLIMITED else count}"
    if time in UNLIMITED:
        return ok("limits of the partition", seen, "end a run by slurm.time_min alone")
    return ok("limits of the partition", seen, "be refused beyond them (slurm.time_min)")
