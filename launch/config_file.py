"""The config.yaml of a run: the source behind each value, which `conf.load` does not keep."""

from __future__ import annotations

import re
from collections.abc import Iterator

from conf.typed import options, sections

_OPTION = re.compile(r"^(?P<indent> *)(?P<name>[A-Za-z_]\w*):(?P<rest>.*)$")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def sources_in(text: str) -> dict[str, str]:
    """Option -> the comment behind its value, for the options that have one. `text` is what `conf.dump` wrote."""
    return {name: source for name, rest in _option_lines(text) if (source := _source(rest))}


def _option_lines(text: str) -> Iterator[tuple[str, str]]:
    """(dotted name, rest of the line) of every option; lines of values that go over several lines are no options."""
    opened: list[str] = []
    for line in text.splitlines():
        match = _OPTION.match(line)
        if match is None:
            continue
        depth = len(match["indent"]) // 2
        name = ".".join([*opened[:depth], match["name"]])
        if name in sections():
            opened = [*opened[:depth], match["name"]]
        elif name in options() and depth <= len(opened):
            yield name, match["rest"]


def _source(rest: str) -> str:
    """Text with blanks is always in double quotes, so the first two blanks and # outside of them begin the comment."""
    return _QUOTED.sub('""', rest).partition("  # ")[2].strip()
