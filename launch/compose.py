"""Hydra overrides become a typed configuration, or a message that names the nearest valid key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from conf.options import walk
from conf.schema import LibraConfig
from launch.errors import ConfigError

CONFIG_MODULE = "conf"
CONFIG_NAME = "config"
_UNKNOWN_KEY = re.compile(r"Key '([^']+)' (?:is )?not in '?(\w+)'?")


def register_schema() -> None:
    ConfigStore.instance().store(name="libra_schema", node=LibraConfig)


@cache
def option_names() -> tuple[str, ...]:
    """Every option by its dotted name."""
    return tuple(name for name, _, _ in walk(LibraConfig()))


def groups() -> dict[str, list[str]]:
    """The choices of each config group, for error messages: {"model": ["demo", ...], ...}."""
    tree = files(CONFIG_MODULE)
    return {
        folder.name: sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml"))
        for folder in tree.iterdir()
        if folder.is_dir() and not folder.name.startswith("_")
    }


def compose_node(overrides: Sequence[str]) -> DictConfig:
    """The composed Hydra node. Raises ConfigError with a short message for anything Hydra or OmegaConf refuses."""
    register_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(version_base="1.3", config_module=CONFIG_MODULE):
            return hydra_compose(config_name=CONFIG_NAME, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([explain(error, overrides)]) from error


def compose(overrides: Sequence[str]) -> LibraConfig:
    """The typed configuration of `overrides` ("+experiment=demo", "total_steps=10", ...). Raises ConfigError."""
    node = compose_node(overrides)
    unknown = unknown_keys(node, overrides)
    if unknown:
        raise ConfigError(unknown)
    return to_typed(node, overrides)


def to_typed(node: DictConfig, overrides: Sequence[str] = ()) -> LibraConfig:
    try:
        return cast(LibraConfig, OmegaConf.to_object(node))
    except OmegaConfBaseException as error:
        raise ConfigError([explain(error, overrides)]) from error


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """One sentence for a Hydra or OmegaConf error, with the nearest valid name when a name is wrong."""
    chain = [error]
    while chain[-1].__cause__ is not None and isinstance(chain[-1].__cause__, Exception):
        chain.append(chain[-1].__cause__)
    for link in reversed(chain):
        found = _UNKNOWN_KEY.search(str(link))
        if found is not None:
            return unknown_key(_dotted(link, found[1]), overrides)
    text = " ".join(str(error).split())
    choice = re.search(r"Could not find '(\w+)/([^']+)'|In '[^']*': Could not find '(\w+)/([^']+)'", text)
    if choice is not None:
        group, name = choice[1] or choice[3], choice[2] or choice[4]
        available = groups().get(group, [])
        return f"there is no {group} '{name}'; available: {', '.join(available)}{_nearest(name, available)}"
    group_typo = re.search(r"Could not (?:override|find) '([\w./@]+)'", text)
    if group_typo is not None:
        return unknown_key(group_typo[1], overrides)
    last = chain[-1]
    if isinstance(last, OmegaConfBaseException) and getattr(last, "full_key", None):
        message = str(last.msg if getattr(last, "msg", None) else last).splitlines()[0]
        return f"{last.full_key}: {message}"
    return text


def _dotted(error: Exception, key: str) -> str:
    full = getattr(error, "full_key", None) if isinstance(error, ConfigKeyError | OmegaConfBaseException) else None
    return str(full) if full else key


def unknown_key(name: str, overrides: Sequence[str]) -> str:
    """The message for an option that does not exist."""
    given = next((text for text in overrides if text.lstrip("+~").startswith(name)), "")
    if name in groups():
        return f"'{given or name}' needs a plus: +{given or name}"
    where = f" (from '{given}')" if given else ""
    return f"unknown option '{name}'{where}{_nearest(name, [*option_names(), *sections(), *groups()])}"


@cache
def sections() -> tuple[str, ...]:
    return tuple(spec.name for spec in fields(LibraConfig) if is_dataclass(_instance(spec)))


def _instance(spec: Any) -> Any:
    return spec.default_factory() if callable(spec.default_factory) else None


def _nearest(name: str, candidates: Sequence[str]) -> str:
    """Nearest full name; a bare name is also compared with the last part of dotted names."""
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    leaf = name.rsplit(".", 1)[-1]
    by_leaf = {candidate.rsplit(".", 1)[-1]: candidate for candidate in candidates}
    close = difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.6)
    return f"; did you mean '{by_leaf[close[0]]}'?" if close else ""


def unknown_keys(node: DictConfig, overrides: Sequence[str] = ()) -> list[str]:
    """A message for every key of `node` that the schema does not declare. Hydra's `+key=value` passes its own checks."""
    problems: list[str] = []
    _collect_unknown(OmegaConf.to_container(node), LibraConfig(), "", problems, overrides)
    return problems


def _collect_unknown(given: Any, declared: Any, prefix: str, problems: list[str], overrides: Sequence[str]) -> None:
    names = {spec.name for spec in fields(declared)}
    for key, value in given.items():
        if key not in names:
            problems.append(unknown_key(f"{prefix}{key}", overrides))
        elif is_dataclass(getattr(declared, key)):
            _collect_unknown(value, getattr(declared, key), f"{prefix}{key}.", problems, overrides)
    problems.extend(
        f"option '{prefix}{name}' was removed; set it to a value instead" for name in sorted(names - set(given))
    )


def hydra_command_line(launch: Callable[[list[str]], None]) -> int:
    """Hydra's own flags (--cfg job, --help, --info, -m for sweeps, --shell-completion) through `hydra.main`.

    A sweep runs `launch` once for each point, with that point's overrides.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig

    register_schema()

    def one_point(_config: DictConfig) -> None:
        launch(list(HydraConfig.get().overrides.task))

    hydra.main(version_base="1.3", config_path="pkg://conf", config_name=CONFIG_NAME)(one_point)()
    return 0
