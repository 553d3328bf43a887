"""`python -m conf.reference`: the configuration reference, made from the schema. Needs the standard library only.

Without options it prints the page docs/configuration.md; `--write` stores it there, `--json` prints every option with the files
that read it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from conf.options import Option, declared
from conf.pending import PLANNER, pending
from conf.schema import GlobalResourcePlannerConfig, LibraConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
CORE, MEGATRON = "Core Options", "Megatron-Core Options"
RUNTIME, RELOADS = "Runtime Planner and Elastic Options", "Rollout Weight Reloads"

INTRODUCTION = """\
# Configuration reference

Generated from the schema by `python -m conf.reference --write`; a test fails when this page is out of date.

Every option is given as `name=value` on the command line, after `+experiment=...` and the other groups. Names are exact: an
unknown one, a wrong type or a value outside the range is an error that names the option. `python -m launch
launch.explain=NAME` prints one option, or a group, with the value it would have, where that was set and which code reads it;
`python -m conf.reference --json` prints all of them for programs. Sizes are in bytes, rates in bytes/s, times in seconds unless
the name says otherwise. Where no end of a range is given, numbers end at 1e30 and whole numbers at 2^53.

An option that is *pending* is declared and checked, but what it stands for is not built yet: any value other than its default
is refused with the sentence given here, never ignored.
"""

INTRODUCTIONS = {
    CORE: "What is trained, on how many GPUs, with which batches, and what the planner keeps free in their memory.",
    MEGATRON: "How the trainer keeps and steps its weights.",
    RUNTIME: "How the GPUs are divided, before the launch and while the run goes on.",
    RELOADS: "When new weights go to the vLLM servers, and how each of them takes them.",
}


@dataclass(frozen=True)
class Entry:
    """One option as it is shown: everything but `default` is text."""

    name: str
    type: str
    default: Any
    unit: str
    range: str
    effect: str
    section: str
    reason: str
    pending: str


def entries() -> dict[str, Entry]:
    """Every option by name, in the order of the page."""
    sentences = pending()
    made = [
        Entry(
            name=option.name,
            type=type_text(option),
            default=option.default,
            unit=option.unit,
            range=range_text(option),
            effect=option.effect,
            section=section_of(option.name),
            reason=option.reason,
            pending=sentences.get(option.name, ""),
        )
        for option in declared(LibraConfig).values()
    ]
    order = list(introductions())
    return {entry.name: entry for entry in sorted(made, key=lambda entry: order.index(entry.section))}


def section_of(name: str) -> str:
    """The owner's section for the owner's options, the group's name for Libra's own."""
    group, _, leaf = name.rpartition(".")
    if group and group != PLANNER:
        return group
    if not group and leaf.startswith("megatron_"):
        return MEGATRON
    if not group and (leaf.startswith("rollout_weight_") or leaf == "sync_interval"):
        return RELOADS
    return RUNTIME if group and not leaf.startswith("memory_budget_") else CORE


def introductions() -> dict[str, str]:
    """Every section with its line, in order: the owner's first, then the groups as the schema declares them."""
    return INTRODUCTIONS | dict(_groups(LibraConfig, ""))


def _groups(root: type, prefix: str) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of every group of options but the owner's, each before those inside it."""
    kinds: dict[str, type] = typing.get_type_hints(root)
    for spec in fields(root):
        kind = kinds[spec.name]
        if is_dataclass(kind) and kind is not GlobalResourcePlannerConfig:
            yield prefix + spec.name, " ".join((inspect.getdoc(kind) or "").split())
            yield from _groups(kind, f"{prefix}{spec.name}.")


def type_text(option: Option) -> str:
    """As people write it: int, float, bool, str, list[int], float or null, mapping."""
    return _type_name(option.type)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is list:
        return f"list[{_type_name(get_args(kind)[0])}]"
    if get_origin(kind) is dict:
        return "mapping"
    if get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_type_name(part) for part in get_args(kind))
    return "null" if kind is type(None) else str(kind.__name__)


def range_text(option: Option) -> str:
    """The accepted values as text: "1 to 8", "> 0, or null", "one of parallel, serial"; the unit stands beside it."""
    return (
        ("each " if option.is_list and option.element_type is not str else "")
        + _accepted(option)
        + (", or null" if option.is_optional else "")
    )


def _accepted(option: Option) -> str:
    if option.choices:
        names = ", ".join(choice for choice in option.choices if choice)
        return f"empty or one of {names}" if "" in option.choices else f"one of {names}"
    if option.element_type is bool:
        return "true, false"
    if option.minimum is not None and option.maximum is not None:
        return f"{value_text(option.minimum)} to {value_text(option.maximum)}"
    bounds = ((">", option.above), (">=", option.minimum), ("<=", option.maximum))
    return ", ".join(f"{sign} {value_text(bound)}" for sign, bound in bounds if bound is not None) or "any"


def value_text(value: Any) -> str:
    """A value as it would be written on the command line, numbers short: 2e9, 0.28, true, null, []."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        text = f"{value:.11e}" if abs(value) >= 1e6 else f"{value:.12g}"
        mantissa, _, exponent = text.partition("e")
        return f"{float(mantissa):.12g}e{int(exponent)}" if exponent else mantissa
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value)


def page() -> str:
    """docs/configuration.md."""
    return INTRODUCTION + "".join(_section(name, line) for name, line in introductions().items())


def _section(name: str, line: str) -> str:
    rows = [_row(entry) for entry in entries().values() if entry.section == name]
    title = name if name in INTRODUCTIONS else f"`{name}.*`"
    table = ["| Option | Meaning | Default | Unit | Range |", "| --- | --- | --- | --- | --- |", *rows]
    return "\n".join([f"\n## {title}\n", f"{line}\n", *table, ""])


def _row(entry: Entry) -> str:
    meaning = ". ".join(_meaning(entry)).replace("<", r"\<").replace("|", r"\|")
    return f"| `{entry.name}` | {meaning} | `{value_text(entry.default)}` | {entry.unit} | {entry.range} |"


def _meaning(entry: Entry) -> Iterator[str]:
    yield entry.effect
    if entry.pending:
        yield f"Pending: {entry.pending}"
    elif entry.reason:
        yield f"Why this default: {entry.reason}"


def records() -> list[dict[str, Any]]:
    """What `--json` prints."""
    from conf.readers import readers

    return [{**vars(entry), "read_by": list(readers()[name])} for name, entry in entries().items()]


def _write() -> int:
    try:
        PAGE.write_text(page(), encoding="utf-8")
    except OSError as error:
        print(f"{PAGE} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conf.reference", description=__doc__)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print every option as a JSON list")
    how.add_argument("--write", action="store_true", help="write docs/configuration.md")
    arguments = parser.parse_args()
    if arguments.write:
        return _write()
    print(json.dumps(records(), indent=1) if arguments.json else page(), end="\n" if arguments.json else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
