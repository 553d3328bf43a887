"""The text of the experiment, and the file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from conf.import_reference.convert import Entry, Imported
from conf.import_reference.errors import ImportReferenceError
from conf.import_reference.rules import OPTIONS, Kind

HEADER = """\
# @package _global_
# Written by `python -m conf.import_reference` from a configuration of the published system.
# A comment beside a value says where it comes from when that is not an option of the same name.
"""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
LONGEST_NAME = 200
PLAIN = re.compile(r"[A-Za-z/.][A-Za-z0-9_/.-]*")
WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n", ".nan", ".inf"})
INTERPOLATION = re.compile(r"(\\*)\$\{")
LONGEST_SHOWN = 60
PUBLISHED_DEFAULT = "published default"
PUBLISHED_ENGINE = "fixed in the published engine"


def experiment_name(wanted: str | None, source: Path) -> str:
    """`wanted`, or one made of the file's name. Raises ImportReferenceError for what Hydra cannot take."""
    name = wanted if wanted is not None else re.sub(r"[^A-Za-z0-9_-]+", "_", source.stem).strip("-") or "imported"
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ImportReferenceError(f"--name {name!r}: use letters, digits, _ and -, {LONGEST_NAME} of them at most")
    if name.lower() == "null":
        raise ImportReferenceError(f"--name {name}: +experiment={name} would choose nothing; choose another --name")
    if (files("conf") / "experiment" / f"{name}.yaml").is_file():
        raise ImportReferenceError(
            f"'{name}' is an experiment that comes with Libra and would win; choose another --name"
        )
    return name


def experiment_text(imported: Imported, name: str) -> str:
    """YAML that `+experiment=NAME` composes. Options are in the order of the schema, groups of options last."""
    options = {"slurm.job_name": name, **imported.options}
    comments = _comments(imported)
    lines = ["defaults:", *(f"  - override /{group}: {choice}" for group, choice in sorted(imported.groups.items()))]
    lines += ["  - override /cluster: slurm", ""]
    top = [option for option in OPTIONS if option in options and "." not in option]
    lines += [_line(option, options[option], comments.get(option, ""), "") for option in top]
    section = ""
    for option in (option for option in OPTIONS if option in options and "." in option):
        prefix, _, leaf = option.partition(".")
        if prefix != section:
            section = prefix
            lines.append(f"{prefix}:")
        lines.append(_line(leaf, options[option], comments.get(option, ""), "  "))
    return HEADER + "\n".join(lines) + "\n"


def _line(key: str, value: Any, comment: str, indent: str) -> str:
    text = f"{indent}{key}: {scalar(value)}"
    return f"{text}  # {comment}" if comment else text


def _comments(imported: Imported) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for entry in imported.defaults:
        text = PUBLISHED_DEFAULT if entry.name else PUBLISHED_ENGINE
        renamed = f" of {entry.name}" if entry.name and entry.name not in entry.outcome.to else ""
        found |= dict.fromkeys(entry.outcome.to, f"{text}{renamed}")
    for entry in imported.entries:
        found |= {option: _was(entry, option) for option in entry.outcome.to}
    return found


def _was(entry: Entry, option: str) -> str:
    name = entry.name if option != entry.name else ""
    changed = entry.outcome.kind is Kind.FIXED and entry.value != entry.outcome.to[option]
    value = shown(entry.value) if changed else ""
    return f"was {' = '.join(part for part in (name, value) if part)}" if name or value else ""


def shown(value: Any) -> str:
    """A value of the input for a person: one line, not too long."""
    text = scalar(value, literal=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 4]} ..."


def scalar(value: Any, *, literal: bool = True) -> str:
    """As YAML in one line. Text is quoted wherever some reader could take it for anything else.

    The published loader knows no interpolation: with `literal`, "${" is kept from OmegaConf by a backslash.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(scalar(element, literal=literal) for element in value)}]"
    if isinstance(value, dict):
        pairs = (f"{scalar(key, literal=literal)}: {scalar(inner, literal=literal)}" for key, inner in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    return _text(INTERPOLATION.sub(_escaped, value) if literal and isinstance(value, str) else str(value))


def _float(value: float) -> str:
    """Shortest form that reads back exactly, with the point and the sign that YAML 1.1 wants: 2.5e+10."""
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return repr(value)
    mantissa, exponent = next(text for text in _exponentials(value) if float(text) == value).split("e")
    point = "" if "." in mantissa else ".0"
    return f"{mantissa}{point}e{exponent[0]}{exponent[1:].lstrip('0') or '0'}"


def _exponentials(value: float) -> Iterator[str]:
    return (f"{value:.{digits}e}" for digits in range(18))


def _escaped(found: re.Match[str]) -> str:
    return found[1] * 2 + r"\${"


def _text(value: str) -> str:
    if PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    quoted: str = yaml.safe_dump(value, default_style='"', allow_unicode=value.isprintable(), width=float("inf"))
    return quoted.strip()


def target(out: Path, name: str | None, source: Path) -> tuple[Path, str]:
    """(file to write, experiment name) for --out: a folder gets experiment/NAME.yaml, NAME.yaml is taken as it is."""
    if out.suffix not in (".yaml", ".yml"):
        chosen = experiment_name(name, source)
        return out / "experiment" / f"{chosen}.yaml", chosen
    if out.suffix == ".yml":
        raise ImportReferenceError(f"--out {out}: Hydra reads .yaml files only")
    if name is not None and name != out.stem:
        raise ImportReferenceError(f"--out {out} and --name {name} disagree; the file's name is the experiment's")
    return out, experiment_name(out.stem, source)


def write(file: Path, text: str, *, replace: bool) -> None:
    """Raises ImportReferenceError when `file` exists, unless `replace`; then the old file or the new one is there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if replace:
            beside = file.with_name(f".{file.name}.{os.getpid()}")
            beside.write_text(text, encoding="utf-8")
            beside.replace(file)
        else:
            with file.open("x", encoding="utf-8") as stream:
                stream.write(text)
    except FileExistsError as error:
        raise ImportReferenceError(f"{file} exists; --force replaces it") from error
    except OSError as error:
        raise ImportReferenceError(f"{file} cannot be written: {error.strerror}") from error
