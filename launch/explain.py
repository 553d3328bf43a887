"""`launch.explain=NAME`: everything there is to know about one option, or a table of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conf.pending import value_of
from conf.readers import readers
from conf.reference import Entry, entries, value_text
from conf.schema import LibraConfig
from launch.errors import ConfigError
from launch.suggest import unknown_option

NOBODY = "nothing yet"
WIDEST = 40
"""Characters of a value in a table."""


def explain_text(name: str, config: LibraConfig, sources: Mapping[str, str]) -> str:
    """The option, or the options of the group, called `name`. Raises ConfigError with the nearest name for any other."""
    known = entries()
    if name in known:
        return _option(known[name], config, sources)
    group = [entry for entry in known.values() if entry.name.startswith(f"{name}.")]
    if not group:
        raise ConfigError([f"launch.explain: {unknown_option(name, '', {})}"])
    return _table([(entry.name, _short(_value(entry, config)), sources[entry.name], entry.effect) for entry in group])


def _option(entry: Entry, config: LibraConfig, sources: Mapping[str, str]) -> str:
    lines = {
        "value": _value(entry, config),
        "default": value_text(entry.default),
        "set by": sources[entry.name],
        "type": entry.type,
        "unit": entry.unit,
        "range": entry.range,
        "effect": entry.effect,
        "why this default": entry.reason,
        "pending": f"{entry.pending}; any value but the default is refused" if entry.pending else "",
        "read by": ", ".join(readers()[entry.name]) or NOBODY,
    }
    return "\n".join([entry.name, *(f"  {label:<16}  {text}" for label, text in lines.items() if text)])


def _value(entry: Entry, config: LibraConfig) -> str:
    return value_text(value_of(config, entry.name))


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as their longest cell; the last one as it is."""
    table = [("option", "value", "set by", "effect"), *rows]
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    widths[-1] = 0
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)
