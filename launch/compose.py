"""Hydra overrides become a typed configuration with the source of every value, or a list of everything that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import Override

from conf.schema import LibraConfig
from conf.typed import assemble, options
from launch.errors import ConfigError
from launch.hydra_internals import FAILURES, Loader
from launch.overrides import sort_words
from launch.sources import Layers, typed
from launch.suggest import unlike_hydra
from launch.tree import HOUSE, Tree, groups

__all__ = ["Composed", "Tree", "compose", "compose_with_sources", "draft", "groups", "option_names"]


@dataclass(frozen=True)
class Composed:
    """`sources` names where each option was set, `choices` the file of each group.

    A draft may have `problems`; the options in `wrong` then have their default, and say nothing. `conflicts` are values that
    could be composed and cannot be run. `said` is what the user should read although nothing is wrong.
    """

    config: LibraConfig
    sources: Mapping[str, str]
    choices: Mapping[str, str]
    problems: tuple[str, ...] = ()
    wrong: frozenset[str] = frozenset()
    conflicts: tuple[str, ...] = ()
    said: tuple[str, ...] = ()


def compose(overrides: Sequence[str], tree: Tree = HOUSE) -> LibraConfig:
    """The typed configuration of `overrides` ("+experiment=demo", "total_steps=10", ...). Raises ConfigError."""
    return compose_with_sources(overrides, tree).config


def compose_with_sources(overrides: Sequence[str], tree: Tree = HOUSE) -> Composed:
    """Raises ConfigError with every unknown name, wrong choice, wrong type and unreadable word."""
    composed = draft(overrides, tree)
    if composed.problems:
        raise ConfigError(composed.problems)
    return composed


def draft(overrides: Sequence[str], tree: Tree = HOUSE) -> Composed:
    """As far as it can be composed, with the problems. Raises ConfigError where a folder or the root file is missing."""
    loader = tree.loader()
    try:
        words = sort_words(overrides, loader)
    except FAILURES as error:
        raise ConfigError([unlike_hydra(error, loader.groups)]) from error
    layers = Layers(loader.groups, problems=words.problems)
    choices = _add_files(layers, loader, words.choices)
    for override in words.values:
        layers.add_override(override)
    values, problems, wrong = typed(layers)
    return Composed(assemble(values), layers.sources, choices, (*layers.problems, *problems), wrong)


def _add_files(layers: Layers, loader: Loader, chosen: Sequence[Override]) -> dict[str, str]:
    try:
        files, choices = loader.files(chosen)
    except FAILURES as error:
        problem = unlike_hydra(error, loader.groups, lambda name: loader.naming(name, chosen))
        said = any(name in problem for override in chosen for name in (override.key_or_group, str(override.value())))
        typed_words = ", ".join(override.input_line or "" for override in chosen)
        layers.problems.append(problem if said or not chosen else f"{typed_words}: {problem}")
        return {}
    for file in files:
        hidden = loader.shadowed(file.label)
        if hidden:
            layers.problems.append(f"{hidden} has the name of {file.label}, which Hydra takes first; rename yours")
        layers.add_file(file)
    return choices


def option_names() -> tuple[str, ...]:
    """Every option by its dotted name."""
    return tuple(options())
