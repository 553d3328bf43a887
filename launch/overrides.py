"""The words of a command line, sorted into choices of groups and values of options; what is neither is a problem."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hydra.core.override_parser.types import Override, OverrideType, ValueType

from conf.typed import options
from launch.hydra_internals import FAILURES, SEARCH_PATH, Loader
from launch.suggest import not_an_assignment, unknown_choice

KEY = re.compile(r"(\+\+?|~)?[A-Za-z_$][\w$-]*([./][\w$-]+)*(@[\w.:$-]*)?")
"""An option or a group, with a package, as Hydra's grammar has them."""
INSTEAD = {
    "hydra.run": "launch.run_dir",
    "hydra.sweep": "launch.run_dir",
    "hydra.job": "launch.run_dir and slurm.job_name",
}
"""What to set in place of options of Hydra that have no effect here."""


@dataclass
class Words:
    """`choices` and `values` in the order typed; `also` changes the search path."""

    choices: list[Override] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    also: list[Override] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def sort_words(texts: Sequence[str], loader: Loader) -> Words:
    """Later choices of one group replace earlier ones, as later values of one option do."""
    words = Words()
    parsed = []
    for text in texts:
        override = _parsed(text, loader, words.problems)
        if override is not None:
            parsed.append(override)
    words.also = [override for override in parsed if override.get_key_element().lstrip("+") == SEARCH_PATH]
    # Hydra takes the first, and none with a plus; here the last counts, as for every other option.
    loader.search_also([replace(override, type=OverrideType.CHANGE) for override in words.also[-1:]])
    words.problems += [*loader.missing_folders(), *loader.unreadable_folders()]
    chosen: dict[str, Override] = {}
    for override in parsed:
        if override in words.also:
            continue
        if problem := _problem(override, loader):
            words.problems.append(problem)
        elif override.key_or_group in loader.groups and not isinstance(override.value(), dict):
            key = override.get_key_element().lstrip("+~")
            chosen.pop(key, None)
            chosen[key] = _named(override)
        else:
            words.values.append(override)
    words.choices = list(chosen.values())
    words.problems += [problem for override in words.choices for problem in _unknown_choices(override, loader)]
    words.choices = [override for override in words.choices if not _unknown_choices(override, loader)]
    return words


def value_text(override: Override) -> str:
    """The value as it was typed."""
    return (override.input_line or "").partition("=")[2]


def _parsed(text: str, loader: Loader, problems: list[str]) -> Override | None:
    key, equals, value = text.partition("=")
    if not key.strip("+~ ") or not (equals or text.startswith("~")):
        problems.append(not_an_assignment(text, loader.groups))
        return None
    try:
        return loader.parse(text)
    except FAILURES as error:
        if not KEY.fullmatch(key):
            problems.append(f"'{text}' cannot be read: '{key}' is no name of an option or group{_plain(key, loader)}")
        else:
            problems.append(
                f"'{text}' cannot be read ({_reason(error)}); put the value in quotes: '{key}={_quoted(value)}'"
            )
        return None


def _plain(key: str, loader: Loader) -> str:
    """What was probably meant by a name with spaces, quotes or brackets."""
    plain = re.sub(r"[^\w./]", "", key.rpartition(" /")[2].partition("[")[0]).lstrip("/")
    return f"; did you mean {plain}=...?" if plain in options() or plain in loader.groups else ""


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = " ".join(str(error.__cause__ or error).split("See https:")[0].split())
    return "a character in it has to stand in quotes" if text.startswith("LexerNoViableAlt") else text


def _quoted(value: str) -> str:
    """`value` in double quotes; each element of it when it is meant as a list."""
    bare = value.replace("'", "").replace('"', "")
    if bare.startswith("[") and bare.endswith("]"):
        elements = (element.strip() for element in bare[1:-1].split(","))
        return "[" + ",".join(f'"{element}"' for element in elements) + "]"
    return f'"{bare}"'


def _problem(override: Override, loader: Loader) -> str:
    """Why this word cannot be used, or ""."""
    key, text = override.key_or_group, override.input_line
    if override.is_sweep_override():
        value = value_text(override)
        as_list = f"; for one list say {key}=[{value}]" if override.value_type is ValueType.SIMPLE_CHOICE_SWEEP else ""
        return f"'{text}' gives several values: add -m for one run each{as_list}"
    if key == "hydra" or override.is_hydra_override():
        return no_hydra(key)
    return ""


def no_hydra(key: str) -> str:
    """Hydra composes the configuration and runs nothing, so nearly all of its own options would be ignored."""
    instead = next((f"; set {ours}" for theirs, ours in INSTEAD.items() if key.startswith(theirs)), "")
    return f"'{key}' has no effect here, Hydra only reads the configuration{instead}"


def _named(override: Override) -> Override:
    """A choice by file name: text for what Hydra's grammar takes for a number, without the suffix; null takes the group out."""
    value = override.value()
    if override.is_delete() or isinstance(value, list):
        return override
    if value is None:
        return replace(override, type=OverrideType.DEL, value_type=None, _value=None)
    name = value if isinstance(value, str) else value_text(override)
    return replace(override, _value=name.removesuffix(".yaml"))


def _unknown_choices(override: Override, loader: Loader) -> list[str]:
    value = override.value()
    names = value if isinstance(value, list) else [value]
    group = override.key_or_group
    known = {*loader.groups[group], *_nested(group, loader)}
    return [unknown_choice(group, str(name), loader.groups) for name in names if name is not None and name not in known]


def _nested(group: str, loader: Loader) -> list[str]:
    """experiment=team/mine is the choice mine of the group experiment/team."""
    inner = {name: choices for name, choices in loader.groups.items() if name.startswith(f"{group}/")}
    return [f"{name.removeprefix(f'{group}/')}/{choice}" for name, choices in inner.items() for choice in choices]
