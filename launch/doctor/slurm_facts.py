"""What Slurm says about itself, read from the text output of its commands (22.05 to 25.x print the same forms)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from launch.doctor.commands import Answer, ask
from launch.slurm import records

PROGRAMS = ("sinfo", "srun", "scontrol", "sbatch")
_USABLE = frozenset({"IDLE", "MIXED", "ALLOCATED", "COMPLETING"})
_UNUSABLE_FLAGS = frozenset(
    {"DRAIN", "FAIL", "MAINTENANCE", "NOT_RESPONDING", "POWERING_DOWN", "REBOOT_ISSUED", "RESERVED", "INVALID_REG"}
)


@dataclass(frozen=True)
class NodeFacts:
    """One node as Slurm has it; `state` in Slurm's words ("IDLE", "MIXED+DRAIN", "DOWN*"). `threads`: of one core."""

    name: str
    version: str
    cpus: int
    memory_bytes: int
    gres: str
    state: str
    partitions: tuple[str, ...]
    threads: int = 1

    def gpus(self, kind: str = "") -> int:
        """Of one type, or all."""
        return count_gpus(self.gres, kind)

    @property
    def is_usable(self) -> bool:
        """Takes jobs now or after the ones that it has."""
        base, *flags = self.state.split("+")
        return base in _USABLE and not _UNUSABLE_FLAGS.intersection(flags)


@dataclass(frozen=True)
class PartitionFacts:
    name: str
    is_default: bool
    state: str
    max_time: str
    max_nodes: str

    @property
    def max_minutes(self) -> int | None:
        """Of "1-12:00:00" or "00:30:00"; None when there is no limit."""
        match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", self.max_time)
        if match is None:
            return None
        days, hours, minutes, _ = (int(part or 0) for part in match.groups())
        return (days * 24 + hours) * 60 + minutes


@dataclass(frozen=True)
class SlurmFacts:
    """`config` is `scontrol show config`; `nodes` are those of `partition`. `versions` maps a program to its release."""

    config: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[NodeFacts, ...] = ()
    partition: PartitionFacts | None = None
    partitions: tuple[str, ...] = ()
    trouble: str = ""

    @property
    def usable(self) -> tuple[NodeFacts, ...]:
        return tuple(node for node in self.nodes if node.is_usable)

    def parameter(self, option: str, name: str) -> str | None:
        """The value of `name` in a comma list such as SchedulerParameters; "" for a bare word, None when it is absent."""
        for word in self.config.get(option, "").split(","):
            key, _, value = word.strip().partition("=")
            if key == name:
                return value
        return None

    def seconds(self, option: str) -> int | None:
        """ "30 sec" -> 30."""
        match = re.match(r"(\d+) sec", self.config.get(option, ""))
        return int(match[1]) if match else None


def parse_config(text: str) -> dict[str, str]:
    """Lines "Name   = value" of `scontrol show config`."""
    pairs = (line.partition(" = ") for line in text.splitlines())
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}


def parse_version(text: str) -> str:
    """ "slurm-wlm 22.05.8" or "slurm 25.05.1-1" -> the number; "" when there is none."""
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)", text)
    return match[1] if match else ""


def release(version: str) -> tuple[int, int]:
    """(23, 11) of "23.11.4"; (0, 0) for an unreadable one."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def count_gpus(gres: str, kind: str = "") -> int:
    """ "gpu:h100:8(S:0-3),shard:32" -> 8; types are added up unless `kind` names one. "gpu" alone is one."""
    found = 0
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = item.strip().split(":")
        if name == "gpu" and (not kind or rest[:-1] == [kind]):
            found += int(rest[-1]) if rest and rest[-1].isdigit() else 1
    return found


def parse_nodes(text: str) -> list[NodeFacts]:
    """Lines of `scontrol -o show node`."""
    return [
        NodeFacts(
            name=record["NodeName"],
            version=parse_version(record.get("Version", "")),
            cpus=_number(record.get("CPUEfctv") or record.get("CPUTot")),
            memory_bytes=_number(record.get("RealMemory")) * 2**20,
            gres="" if record.get("Gres") == "(null)" else record.get("Gres", ""),
            state=record.get("State", ""),
            partitions=tuple(record.get("Partitions", "").split(",")),
            threads=_number(record.get("ThreadsPerCore")) or 1,
        )
        for record in records(text, "NodeName")
    ]


def parse_partitions(text: str) -> list[PartitionFacts]:
    """Lines of `scontrol -o show partition`."""
    return [
        PartitionFacts(
            name=record["PartitionName"],
            is_default=record.get("Default") == "YES",
            state=record.get("State", ""),
            max_time=record.get("MaxTime", ""),
            max_nodes=record.get("MaxNodes", ""),
        )
        for record in records(text, "PartitionName")
    ]


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


Ask = Callable[[Sequence[str]], Answer]


def gather(partition: str, asking: Ask = ask) -> SlurmFacts:
    """Ask Slurm. What it does not answer stays empty and is said in `trouble`; `partition` "" is the default one."""
    answers = {
        "config": asking(["scontrol", "show", "config"]),
        "node": asking(["scontrol", "-o", "show", "node"]),
        "partition": asking(["scontrol", "-o", "show", "partition"]),
    }
    troubles = [f"scontrol show {what}: {answer.words}" for what, answer in answers.items() if not answer.is_ok]
    everything = parse_partitions(answers["partition"].out if answers["partition"].is_ok else "")
    chosen = next((found for found in everything if (found.name == partition if partition else found.is_default)), None)
    nodes = parse_nodes(answers["node"].out if answers["node"].is_ok else "")
    return SlurmFacts(
        config=parse_config(answers["config"].out if answers["config"].is_ok else ""),
        versions={program: parse_version(asking([program, "--version"]).out) for program in PROGRAMS},
        nodes=tuple(node for node in nodes if chosen is not None and chosen.name in node.partitions),
        partition=chosen,
        partitions=tuple(found.name for found in everything),
        trouble="; ".join(troubles),
    )
