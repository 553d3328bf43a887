"""A configuration as YAML: every option, resolved, each with the source of its value behind it.

The text is for people, for PyYAML and for OmegaConf, whose readers differ: text that one of them would take for a number, a
switch or an interpolation is put in quotes, and `${` is escaped in OmegaConf's way. `conf.load` reads it back the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import yaml

from conf.options import walk
from conf.schema import LibraConfig

HEADER = """\
# Every option of a run, with where its value comes from. To run it again, with changes if you like:
#   python -m launch --config-path FOLDER_OF_THIS_FILE launch.run_dir=NEW_FOLDER
"""
LARGE = 1e6
"""Floats from here on are written with an exponent: 8.0e+10 bytes."""
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null", "none"})
_BEFORE_INTERPOLATION = re.compile(r"(\\*)\$\{")


def dump(config: LibraConfig, sources: Mapping[str, str], section: str = "") -> str:
    """`config` as text; `section` is the dotted name of the only option, or group of options, wanted; empty for all."""
    lines: list[str] = []
    opened: tuple[str, ...] = ()
    for name, _, value in walk(config):
        if section and name != section and not name.startswith(f"{section}."):
            continue
        *parents, leaf = name.split(".")
        for depth, parent in enumerate(parents):
            if opened[: depth + 1] != tuple(parents[: depth + 1]):
                lines.append(f"{'  ' * depth}{parent}:")
        opened = tuple(parents)
        lines += _option(leaf, value, len(parents), sources.get(name, ""))
    return ("" if section else HEADER) + "".join(f"{line}\n" for line in lines)


def _option(name: str, value: Any, depth: int, source: str) -> Iterator[str]:
    comment = f"  # {_printable(source)}" if source else ""
    indent = "  " * depth
    if isinstance(value, dict) and value:
        yield f"{indent}{name}:{comment}"
        yield from _nested(value, depth + 1)
    else:
        yield f"{indent}{name}: {flow(value)}{comment}"


def _nested(values: dict[str, Any], depth: int) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield f"{'  ' * depth}{_text(key)}:"
            yield from _nested(value, depth + 1)
        else:
            yield f"{'  ' * depth}{_text(key)}: {flow(value)}"


def flow(value: Any) -> str:
    """One line of YAML for any value, which every reader takes for the same."""
    if isinstance(value, str):
        return _text(_escaped(value))
    if isinstance(value, list):
        return f"[{', '.join(flow(element) for element in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {flow(element)}' for key, element in value.items())}}}"
    if isinstance(value, float) and LARGE <= abs(value) < math.inf:
        digits, exponent = f"{Decimal(repr(value)).normalize():E}".split("E")
        return f"{digits}{'' if '.' in digits else '.0'}e{exponent}"
    text: str = yaml.safe_dump(value)
    return text.removesuffix("...\n").rstrip("\n")


def _text(text: str) -> str:
    """Plain where every reader takes it for text, else in double quotes, on one line whatever is in it."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    quoted: str = yaml.safe_dump(text, default_style='"', width=float("inf"), allow_unicode=True)
    return quoted.rstrip("\n")


def _printable(source: str) -> str:
    """A comment ends with its line and takes no control characters: paths may have both."""
    return "".join(character if character.isprintable() else "?" for character in source)


def _escaped(text: str) -> str:
    r"""OmegaConf reads `\${` as `${`, and only there a doubled backslash as one."""
    return _BEFORE_INTERPOLATION.sub(lambda found: "\\" * (2 * len(found[1]) + 1) + "${", text)
