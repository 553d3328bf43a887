"""The account of an import, for a person: every key of the input under one heading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from conf.import_reference.convert import SECRET, Entry, Imported
from conf.import_reference.published import DEFAULTS
from conf.import_reference.read import Source
from conf.import_reference.rules import Kind
from conf.import_reference.write import shown

HEADINGS = {
    Kind.KEPT: "kept, same name and value",
    Kind.RENAMED: "renamed",
    Kind.FIXED: "fixed: the value is another",
    Kind.DROPPED: "dropped",
    Kind.UNKNOWN: "unknown",
}
UNKNOWN_NOTE = (
    "The published system has no such option, so these lines did nothing there: it ignores what it does not know, in silence.",
    "Correct or delete them, or give --lenient to leave them out.",
)


def report(source: Source, imported: Imported, problems: Sequence[str]) -> str:
    """Several lines, no line break at the end. `problems` are what a launch would still say."""
    lines = [f"read: {', '.join(file.name for file in source.files)}"]
    for kind in Kind:
        entries = [entry for entry in imported.entries if entry.outcome.kind is kind]
        if entries:
            lines += ["", f"{HEADINGS[kind]} ({len(entries)})"]
            lines += _dropped(source, entries) if kind is Kind.DROPPED else _listed(source, entries)
            lines += [f"  {line}" for line in UNKNOWN_NOTE] if kind is Kind.UNKNOWN else []
    defaults = [entry for entry in imported.defaults if entry.name]
    if defaults:
        lines += ["", f"published defaults that the input relied on, written out ({len(defaults)})"]
        lines += chain.from_iterable(_entry(entry, "") for entry in defaults)
    todo = list(dict.fromkeys((*imported.todo, *problems)))
    if todo:
        lines += ["", "you still have to set", *(f"  - {line}" for line in todo)]
    return "\n".join(lines)


def refusal(source: Source, imported: Imported) -> str:
    """The unknown keys alone, for an input that is not imported because of them."""
    lines = [
        f"{source.files[-1]}: {len(imported.unknown)} unknown, nothing was written",
        *_listed(source, imported.unknown),
    ]
    return "\n".join((*lines, *UNKNOWN_NOTE))


def _listed(source: Source, entries: Iterable[Entry]) -> Iterator[str]:
    return chain.from_iterable(_entry(entry, _origin(source, entry)) for entry in entries)


def _entry(entry: Entry, origin: str) -> Iterator[str]:
    outcome = entry.outcome
    line = f"  {_name(entry)} = {_shown(entry)}{origin}"
    if outcome.to and outcome.kind is not Kind.KEPT:
        line += f"  ->  {_targets(entry)}"
    yield line
    if outcome.why:
        yield f"      {outcome.why}"


def _targets(entry: Entry) -> str:
    return ", ".join(f"{option} = {shown(value)}" for option, value in entry.outcome.to.items())


def _dropped(source: Source, entries: Iterable[Entry]) -> Iterator[str]:
    """By reason: a file that the published system wrote out itself has two hundred of them."""
    by_reason: dict[str, list[Entry]] = {}
    for entry in entries:
        by_reason.setdefault(entry.outcome.why, []).append(entry)
    for why, those in by_reason.items():
        yield f"  {why}"
        for entry in those:
            usual = " (its default)" if entry.value == DEFAULTS[entry.name] else ""
            yield f"      {_name(entry)} = {_shown(entry)}{usual}{_origin(source, entry)}"


def _name(entry: Entry) -> str:
    return entry.name if entry.name.isprintable() else repr(entry.name)


def _shown(entry: Entry) -> str:
    return "(not shown)" if entry.name.endswith(SECRET) else shown(entry.value)


def _origin(source: Source, entry: Entry) -> str:
    """The file, when it is not the one that was asked for."""
    file = source.origins[entry.name]
    return "" if file == source.files[-1] else f"  [{file.name}]"
