"""The nodes of a partition, as sinfo prints them, against what a job asks for. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launch import slurm
from launch.errors import LibraError
from launch.hetjob import Component, HetJobSpec

SINFO = ("sinfo", "-a", "-h", "-o", "%P|%N|%c|%m|%G|%f|%T|%l|%s")
NAMED = 5
"""Nodes that a message names before it counts the others."""
OUT_OF_USE = ("down", "drain", "fail", "error", "inval", "unknown", "future", "power_down", "powering_down")


class SubmitError(LibraError):
    """Slurm refused the job, or would never start it; the message is Slurm's own, or wanted and available."""


@dataclass(frozen=True)
class Nodes:
    """Nodes of one partition that are alike, as a line of sinfo. `limit_s` and `most_nodes` are None where there is none."""

    partition: str
    is_default: bool
    names: frozenset[str]
    cpus: int
    memory_bytes: int
    gpus: tuple[tuple[str, int], ...]
    features: frozenset[str]
    is_usable: bool
    limit_s: int | None
    most_nodes: int | None

    def can_hold(self, component: Component) -> bool:
        """Could one of these nodes be one of the component's, when it is empty?"""
        held = sum(number for kind, number in self.gpus if component.gpu_type in ("", kind))
        return (
            self.cpus >= component.cpus
            and self.memory_bytes >= component.mem_bytes
            and held >= gpus_wanted(component)
            and plain_features(component.constraint) <= self.features
        )


def parse_sinfo(text: str) -> list[Nodes]:
    """Lines of `sinfo -h -o '%P|%N|%c|%m|%G|%f|%T|%l|%s'`; lines that are none are skipped."""
    found = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 9:
            continue
        partition, names, cpus, memory, gres, features, state, limit, sizes = (field.strip() for field in fields)
        most = sizes.rpartition("-")[2]
        found.append(
            Nodes(
                partition=partition.rstrip("*"),
                is_default=partition.endswith("*"),
                names=frozenset(slurm.expand_nodes(names)),
                cpus=_number(cpus),
                memory_bytes=_number(memory) * 2**20,
                gpus=tuple(parse_gres(gres)),
                features=frozenset(features.split(",")) - {"(null)"},
                is_usable=not state.lower().startswith(OUT_OF_USE),
                limit_s=parse_duration_s(limit),
                most_nodes=_number(most) if most.isdigit() else None,
            )
        )
    return found


def parse_gres(text: str) -> Iterable[tuple[str, int]]:
    """(type, number) of each GPU entry: "gpu:8", "gpu:h100:8(S:0-1)", "gpu:a100:4,gpu:1g.10gb:2,tmpfs:100"."""
    for kind, count in re.findall(r"(?:^|,)gpu(?::([^:,(]*[^\d:,(][^:,(]*))?:(\d+)", text):
        yield kind, int(count)


def parse_duration_s(text: str) -> int | None:
    """Slurm's "30" (minutes), "10:00", "12:00:00", "7-00", "7-00:00:00"; None for "infinite" and whatever is no duration."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def gpus_wanted(component: Component) -> int:
    """On each node, as Slurm counts: none where it is not asked for any."""
    return 0 if component.gpu_flag == "none" else component.gpus_per_node


def plain_features(constraint: str) -> frozenset[str]:
    """The features of "h100&nvme". Alternatives, counts and brackets are Slurm's to judge: nothing is demanded then."""
    words = constraint.split("&") if constraint else []
    return frozenset(words) if all(re.fullmatch(r"[\w.\-]+", word) for word in words) else frozenset()


# ---- the whole job --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Components that ask for the same nodes."""

    components: tuple[Component, ...]
    places: tuple[Nodes, ...]

    @property
    def wanted(self) -> int:
        return sum(component.nodes for component in self.components)

    def fitting(self, *, usable_only: bool = False) -> frozenset[str]:
        """Names of the nodes that could be one of the group's."""
        first = self.components[0]
        names = (place.names for place in self.places if place.can_hold(first) and (place.is_usable or not usable_only))
        return frozenset[str]().union(*names) - frozenset(slurm.expand_nodes(first.exclude))

    @property
    def roles(self) -> str:
        return " and ".join(dict.fromkeys(role for component in self.components for role in component.roles))

    @property
    def verb(self) -> str:
        return "want" if " and " in self.roles else "wants"

    @property
    def where(self) -> str:
        return f"partition {self.components[0].partition or self.places[0].partition}"

    @property
    def shape(self) -> str:
        """Of one node that the group asks for."""
        first = self.components[0]
        count, kind = gpus_wanted(first), first.gpu_type
        words = [*([f"{count} {kind + ' ' if kind else ''}GPUs"] if count else []), f"{first.cpus} processors"]
        words += [f"{first.mem_bytes / 1e9:.4g} GB"] if first.mem_bytes else []
        words += [f"feature {first.constraint}"] if first.constraint else []
        return ", ".join(words)


def groups_of(spec: HetJobSpec, nodes: Sequence[Nodes]) -> list[Group]:
    """A group in a partition that sinfo does not show has no places: nothing is known about it."""
    by_wish: dict[Component, list[Component]] = {}
    for component in spec.components:
        alike = Component(**{**vars(component), "nodes": 0, "roles": ()})
        by_wish.setdefault(alike, []).append(component)
    return [Group(tuple(members), _places(wish.partition, nodes)) for wish, members in by_wish.items()]


def _places(partition: str, nodes: Sequence[Nodes]) -> tuple[Nodes, ...]:
    names = [name for name in partition.split(",") if name]
    return tuple(place for place in nodes if (place.partition in names if names else place.is_default))


def partition_problems(spec: HetJobSpec, nodes: Sequence[Nodes]) -> list[str]:
    """Why the job could never start, with wanted, available and the option to change.

    Nodes that are down count: they come back, and Slurm lets a job wait for them.
    """
    groups = groups_of(spec, nodes)
    found = [problem for group in groups for problem in _too_few(group, nodes)]
    found += list(dict.fromkeys(problem for group in groups for problem in _beyond_limits(group, spec.time_min)))
    together = _together(groups)
    wanted = sum(group.wanted for group in groups)
    if not found and len(groups) > 1 and all(group.places for group in groups) and wanted > len(together):
        found.append(
            f"the job wants {wanted} nodes ({' and '.join(f'{group.wanted} for {group.roles}' for group in groups)}), available"
            f" {len(together)}: components share no node; lower train_gpus or rollout_gpus, or change slurm.partition"
        )
    return found


def _too_few(group: Group, nodes: Sequence[Nodes]) -> Iterable[str]:
    available = len(group.fitting())
    if not group.places or group.wanted <= available:
        return
    first = group.components[0]
    narrowing = {"slurm.constraint": first.constraint, "slurm.exclude": first.exclude, "slurm.gpu_type": first.gpu_type}
    options = ["slurm.partition", *(name for name, value in narrowing.items() if value), "hardware.gpus_per_node"]
    yield (
        f"{group.roles} {group.verb} {group.wanted} node(s) with {group.shape} in {group.where}, available {available} (it has"
        f" {_kinds(group.places)}); lower train_gpus or rollout_gpus, or change {', '.join(options)} or hardware.cpus_per_node"
    )


def _kinds(places: Sequence[Nodes]) -> str:
    """ "12 x 8 h100 GPUs, 96 processors, 1000 GB; 40 x no GPU, 64 processors, 256 GB"."""
    by_kind: dict[str, frozenset[str]] = {}
    for place in places:
        cards = " and ".join(f"{count} {kind + ' ' if kind else ''}GPUs" for kind, count in place.gpus) or "no GPU"
        kind = f"{cards}, {place.cpus} processors, {place.memory_bytes / 1e9:.4g} GB"
        by_kind[kind] = by_kind.get(kind, frozenset()) | place.names
    return "; ".join(f"{len(names)} x {kind}" for kind, names in by_kind.items())


def _beyond_limits(group: Group, time_min: int) -> Iterable[str]:
    """Limits of the partition, which a quality of service may lift: then Slurm is left to judge."""
    if not group.places or any(component.qos for component in group.components):
        return
    limits = [place.limit_s for place in group.places]
    longest_s = None if None in limits else max(limit for limit in limits if limit is not None)
    if longest_s is not None and time_min * 60 > longest_s:
        yield (
            f"slurm.time_min={time_min} is more than {group.where} allows, {longest_s // 60} min: the job would wait for ever;"
            " lower slurm.time_min or change slurm.partition (or slurm.qos, where one lifts the limit)"
        )
    sizes = [place.most_nodes for place in group.places]
    most = None if None in sizes else max(size for size in sizes if size is not None)
    largest = max(component.nodes for component in group.components)
    if most is not None and largest > most:
        yield (
            f"{group.roles} {group.verb} {largest} nodes, {group.where} allows a job {most}; lower train_gpus or rollout_gpus, or"
            " change slurm.partition (or slurm.qos, where one lifts the limit)"
        )


def waiting_for(spec: HetJobSpec, nodes: Sequence[Nodes]) -> str:
    """What the job has to wait for although the cluster is large enough, "" for nothing of the kind."""
    groups = [group for group in groups_of(spec, nodes) if group.places]
    whole = Group(tuple(one for group in groups for one in group.components), ())
    for subject, wanted, fitting, up in (
        *((group, group.wanted, group.fitting(), group.fitting(usable_only=True)) for group in groups),
        (whole, whole.wanted, _together(groups), _together(groups, usable_only=True)),
    ):
        if wanted > len(up):
            away = sorted(fitting - up)
            names = ", ".join(away[:NAMED]) + (f" and {len(away) - NAMED} more" if len(away) > NAMED else "")
            return (
                f"{subject.roles} {subject.verb} {wanted} of the {len(fitting)} nodes that fit, and {len(up)} of them are up"
                f" (down or drained: {names})"
            )
    return ""


def _together(groups: Sequence[Group], *, usable_only: bool = False) -> frozenset[str]:
    return frozenset[str]().union(*(group.fitting(usable_only=usable_only) for group in groups))


def _number(text: str) -> int:
    """ "64+" (sinfo's word for at least) is 64."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
