"""Where every value comes from: the files in the order in which they apply, then the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.typed import DEEPEST, WrongTypeError, convert, is_too_deep, leaves, options, sections
from launch.hydra_internals import TreeFile
from launch.overrides import no_hydra, value_text
from launch.suggest import Groups, unknown_option

DEFAULT = "default"
COMMAND_LINE = "command line"
OPEN = "???"
"""How a file says that somebody has to set an option (OmegaConf)."""
_WHOLE_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")


@dataclass
class Layers:
    """Values by dotted name, not yet of the declared types, with interpolations; `given` is the text of an override."""

    groups: Groups
    values: dict[str, Any] = field(default_factory=lambda: {name: option.default for name, option in options().items()})
    sources: dict[str, str] = field(default_factory=lambda: dict.fromkeys(options(), DEFAULT))
    given: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add_file(self, file: TreeFile) -> None:
        for name, value in leaves(file.values):
            if name == "hydra":
                self._no_hydra(value, file.label)
            elif value == OPEN and self.sources.get(name, DEFAULT) != DEFAULT:
                continue  # an option that an earlier file has set stays set, as in OmegaConf
            else:
                self._put(name, value, file.label, file.label)

    def add_override(self, override: Override) -> None:
        name, text = override.key_or_group, override.input_line or ""
        if override.package is not None:
            self.problems.append(unknown_option(f"{name}@{override.package}", text, self.groups))
        elif override.is_delete():
            self._take_out(name, text)
        else:
            value = override.value()
            if isinstance(value, int | float | bool) and _wants_text(name):
                value = value_text(override)  # job_name=1e3 is meant as typed
            given = f"{name}={value_text(override)}"
            for leaf, leaf_value in leaves({name: value}):
                self._put(leaf, leaf_value, COMMAND_LINE, given)

    def _put(self, name: str, value: Any, source: str, given: str) -> None:
        holder = _holder(name)
        if name in sections():
            shown = given if source == COMMAND_LINE else f"{name}={_shown(value)} ({source})"
            self.problems.append(f"{shown}: {name} is a group of options; set one of them, {name}.OPTION=VALUE")
        elif holder is None:
            self.problems.append(_unknown(name, source, given, self.groups))
        elif holder != name and options()[holder].is_list:
            self.problems.append(f"{given}: {holder} is a list and is set as a whole, {holder}=[...]")
        else:
            for part in reversed(name.removeprefix(holder).split(".")[1:]):
                value = {part: value}
            if is_too_deep(value):
                where = given if source == COMMAND_LINE else f"{name} ({source})"
                self.problems.append(f"{where}: {holder} is nested deeper than {DEEPEST} levels")
                return
            before = self.values[holder]
            is_more = isinstance(before, dict) and isinstance(value, dict) and before
            self.values[holder] = _merged(before, value) if is_more else value
            self.sources[holder] = _and(self.sources[holder], source) if is_more else source
            self.given[holder] = given

    def _take_out(self, name: str, text: str) -> None:
        holder = _holder(name)
        if name in sections():
            self.problems.append(f"{text}: a group of options cannot be taken out; set {name}.OPTION=VALUE instead")
            return
        if holder is None:
            self.problems.append(_unknown(name, COMMAND_LINE, text, self.groups))
            return
        *parents, leaf = name.removeprefix(holder).split(".")
        inside = self.values[holder]
        for part in parents[1:]:
            inside = inside.get(part) if isinstance(inside, dict) else None
        if holder == name:
            self.problems.append(f"{text}: an option cannot be taken out; set {name} to a value instead")
        elif not isinstance(inside, dict) or leaf not in inside:
            self.problems.append(f"{text}: there is no {name}")
        else:
            self.values[holder] = _without(self.values[holder], name.removeprefix(f"{holder}.").split("."))
            self.sources[holder] = _and(self.sources[holder], COMMAND_LINE)

    def _no_hydra(self, value: Any, label: str) -> None:
        names = [f"hydra.{key}" for key in value if key != "searchpath"] if isinstance(value, Mapping) else ["hydra"]
        self.problems += [f"{label}: {no_hydra(name)}" for name in names]


def typed(layers: Layers) -> tuple[dict[str, Any], list[str], frozenset[str]]:
    """Converted values by name, a problem for each option that has none, and the names of those options."""
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    resolved = _resolved(layers.values)
    for name, option in options().items():
        value, raw = resolved[name], layers.values[name]
        try:
            if isinstance(value, OmegaConfBaseException):
                raise WrongTypeError(_broken(value))
            if _is_interpolated(raw) and _wants_text(name) and isinstance(value, int | float):
                value = str(value)
            values[name] = convert(option, value)
        except WrongTypeError as error:
            gives = f", this gives {value!r}" if _is_interpolated(raw) and not isinstance(value, Exception) else ""
            problems[name] = f"{_assignment(name, layers)}: {error}{gives}"
    # What only repeats the value of another option is as wrong as that one, which is said already.
    said = [text for name, text in problems.items() if _repeated(layers.values[name]) not in problems]
    return values, said, frozenset(problems)


def _assignment(name: str, layers: Layers) -> str:
    """ "train_gpus=8GB", with the file where it is not from the command line."""
    raw, given, source = layers.values[name], layers.given.get(name, ""), layers.sources[name]
    if source == COMMAND_LINE and given.startswith(f"{name}="):
        return given
    return f"{name}={_shown(raw)}{'' if source == COMMAND_LINE else f' ({source})'}"


def _shown(raw: Any) -> str:
    return "null" if raw is None else str(raw).lower() if isinstance(raw, bool) else repr(raw)


def _repeated(raw: Any) -> str:
    """The option whose value `raw` takes over, "seed" for "${seed}"; else ""."""
    found = _WHOLE_INTERPOLATION.fullmatch(raw) if isinstance(raw, str) else None
    return found[1] if found else ""


def _resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Every value without interpolations; the error in place of one that leads nowhere."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *parents, leaf = name.split(".")
        inside = nested
        for part in parents:
            inside = inside.setdefault(part, {})
        inside[leaf] = value
    node = OmegaConf.create(nested)
    try:
        whole = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException:
        return {name: _select(node, name) for name in values}
    return {name: _inside(whole, name) for name in values}


def _select(node: Any, name: str) -> Any:
    try:
        value = OmegaConf.select(node, name, throw_on_resolution_failure=True, throw_on_missing=True)
        return (
            OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value
        )
    except OmegaConfBaseException as error:
        return error


def _inside(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values


def _broken(error: OmegaConfBaseException) -> str:
    text = " ".join(str(error).split("full_key")[0].split())
    return f"{OPEN} means that you have to set it" if "Missing mandatory value" in text else text


def _is_interpolated(raw: Any) -> bool:
    return isinstance(raw, str) and "${" in raw


def _wants_text(name: str) -> bool:
    option = options().get(name)
    return option is not None and option.type is str


def _holder(name: str) -> str | None:
    """The option that `name` is, or in whose dict or list it lies; None when there is none."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        option = options().get(".".join(parts[:count]))
        if option is not None and (count == len(parts) or option.is_list or isinstance(option.default, dict)):
            return option.name
    return None


def _unknown(name: str, source: str, given: str, groups: Groups) -> str:
    first = name.split(".", 1)[0]
    if source != COMMAND_LINE and first in groups and first not in sections():
        return f"{source} lacks the line '# @package _global_' at its top: without it, '{name}' is set"
    return unknown_option(name, given, groups)


def _merged(before: Any, more: Any) -> Any:
    """As OmegaConf merges: dicts key by key, anything else replaced."""
    if not isinstance(before, dict) or not isinstance(more, dict):
        return more
    return before | {key: _merged(before.get(key), value) for key, value in more.items()}


def _without(values: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    first, *rest = path
    if not rest:
        return {key: value for key, value in values.items() if key != first}
    return values | {first: _without(values[first], rest)}


def _and(before: str, source: str) -> str:
    """Several sources of one mapping, each named once."""
    return before if source in before.split(", ") else source if before == DEFAULT else f"{before}, {source}"
