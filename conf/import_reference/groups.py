"""Shipped group files that say what the input says: hardware=a100_80g in place of six numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from math import isclose
from typing import Any

import yaml

from conf.import_reference.convert import Entry, Imported
from conf.import_reference.rules import OPTIONS, Kind

SAME_DEVICE = 0.03
"""Data sheets are rounded: the published profiles say 2.0e12 where the A100's sheet says 2.039e12 bytes/s."""
DEVICE = ("hardware.gpu_flops", "hardware.gpu_memory_bytes", "hardware.gpu_memory_bytes_per_s")
RATES = ("hardware.link_bytes_per_s", "hardware.network_bytes_per_s")
LOSS = ("clip_low", "clip_high", "normalize_advantage", "drop_uniform_groups", "overlong_buffer_tokens")
IDENTITY: dict[str, tuple[str, ...]] = {"hardware": DEVICE, "algorithm": tuple(f"algorithm.{name}" for name in LOSS)}
"""Options in which a file has to agree; in what else it differs, the value of the input stands beside it. For other groups
the file has to agree in all that the input says."""
LENIENT = {"model.vocab_size": 0.01, **dict.fromkeys((*DEVICE, *RATES), SAME_DEVICE)}
"""Relative differences below which a number of the input and one of a file are the same. The published model files count
the tokens of a tokenizer where config.json counts rows of the embedding."""


def choose(imported: Imported) -> Imported:
    """`imported` with group files in place of the values that they hold."""
    for group in ("hardware", "model", "algorithm"):
        wanted = {name: value for name, value in imported.options.items() if name.startswith(f"{group}.")}
        name = _pick(group, wanted) if wanted else None
        if name is not None:
            imported = _absorb(imported, group, name, wanted)
    return imported


def _pick(group: str, wanted: Mapping[str, Any]) -> str | None:
    """Of the files that agree where it matters, the one that agrees most; the first by name among equals."""
    scores: dict[str, int] = {}
    for name, values in _choices(group).items():
        said = _with_defaults(wanted, values)
        agreeing = {option for option in wanted if _same(option, wanted, said)}
        if agreeing.issuperset(IDENTITY.get(group, wanted)) and not _other_kind(wanted, values):
            scores[name] = len(agreeing)
    return max(scores, key=lambda name: scores[name]) if scores else None


def _other_kind(wanted: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """A mixture of experts may have the widths of a dense model."""
    return bool(values.get("model.num_experts", 0) and not wanted.get("model.num_experts", 0))


def _with_defaults(wanted: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says about the wanted options; what it leaves open has the default of the option."""
    return {option: values.get(option, OPTIONS[option].default) for option in wanted}


def _same(option: str, wanted: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    here, there = wanted.get(option), values.get(option)
    if isinstance(here, float | int) and isinstance(there, float | int):
        return isclose(here, there, rel_tol=LENIENT.get(option, 1e-9))
    return bool(here == there)


def _absorb(imported: Imported, group: str, name: str, wanted: Mapping[str, Any]) -> Imported:
    """Leave out what the file says; what differs from it stays beside it."""
    said = _with_defaults(wanted, _choices(group)[name])
    absorbed = {option for option in wanted if _same(option, wanted, said)}
    options = {option: value for option, value in imported.options.items() if option not in absorbed}
    entries = tuple(_with_group(entry, f"{group}={name}", absorbed, said) for entry in imported.entries)
    defaults = tuple(entry for entry in imported.defaults if not set(entry.outcome.to) <= absorbed)
    groups = {**imported.groups, group: name}
    return replace(imported, options=options, entries=entries, defaults=defaults, groups=groups)


def _with_group(entry: Entry, choice: str, absorbed: set[str], values: Mapping[str, Any]) -> Entry:
    """The account of a key whose value the file now holds, with the file's number where it is another."""
    if not entry.outcome.to or not set(entry.outcome.to) <= absorbed:
        return entry
    held = {option: values[option] for option in entry.outcome.to}
    kind, why = entry.outcome.kind, [entry.outcome.why] if entry.outcome.why else []
    if held == entry.outcome.to:
        why.append(f"{choice} says it")
    else:
        kind = Kind.FIXED
        why.append(f"{choice} has the exact number")
    return replace(entry, outcome=replace(entry.outcome, kind=kind, to=held, why="; ".join(why)))


@cache
def _choices(group: str) -> dict[str, dict[str, Any]]:
    """Option values of each shipped file of a group that sets nothing else, by its name."""
    folder = files("conf") / group
    if not folder.is_dir():
        return {}
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    read = {name[: -len(".yaml")]: _values((folder / name).read_text(), group) for name in names}
    return {name: values for name, values in read.items() if values}


def _values(text: str, group: str) -> dict[str, Any]:
    """{"hardware.gpu_flops": ...}, with the types of the options; {} when the file reaches outside its group."""
    tree = yaml.safe_load(text) or {}
    if f"@package {group}" in text.partition("\n")[0]:
        tree = {group: tree}
    pairs = dict(_leaves(tree, ""))
    if not all(name in OPTIONS and name.startswith(f"{group}.") for name in pairs):
        return {}
    return {name: OPTIONS[name].element_type(value) if value is not None else None for name, value in pairs.items()}


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
