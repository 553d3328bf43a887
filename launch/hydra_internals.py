"""The only module that uses what Hydra 1.3 does not promise to keep: which file of the tree contributes what.

Hydra's `compose` merges everything into one typed node at once: it stops at the first wrong value and forgets the files.
Here its own parts do the same work up to the merge: `OverridesParser` for the grammar, `create_defaults_list` for the order
of files and packages, `ConfigLoaderImpl` for the search path and for reading a file into its package. What is used with an
underscore: `_internal.utils` (`create_config_search_path`, `get_args_parser`), `_internal.config_repository` and
`_internal.defaults_list`, and of the loader `_process_config_searchpath` and `_load_single_config`; checked with 1.3.2 and
1.3.8, and setup.cfg keeps Hydra below 1.4.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import GroupDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.schema import LibraConfig
from launch.config_files import UnusableFileError, check_text

FAILURES = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError, RecursionError)
"""What Hydra raises for files and overrides that it cannot use."""
SCHEMA_NAME = "libra_schema"
HOUSE_ROOT = "pkg://conf"
VERSION_BASE = "1.3"
HYDRA_PROVIDERS = ("hydra", "schema")
SEARCH_PATH = "hydra.searchpath"
ASKED_BY = {"main": "--config-path", "command-line": "--config-dir"}
"""Provider of an entry of the search path -> the flag that names it."""


@dataclass(frozen=True)
class TreeFile:
    """What one file sets, with its package around it. `label` is how people find it."""

    label: str
    values: dict[str, Any]


class Repository(CachingConfigRepository):
    """Whatever makes a file unusable is said with the name of the file; what would take for ever is not tried."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        file = self._file(config_path)
        try:
            if os.path.isabs(file) and f"config_path={config_path}" not in self.cache:
                check_text(file)
            found = super().load_config(config_path)
        except FAILURES as error:
            raise UnusableFileError(file, error) from error
        if found is not None and not isinstance(found.config, DictConfig):
            raise UnusableFileError(file, "it holds a list, not a mapping of options")
        return found

    def _file(self, config_path: str) -> str:
        """Where Hydra finds it: an absolute path, or as it is labelled when it comes with Libra or is nowhere."""
        for source in self.get_sources():
            if source.provider not in HYDRA_PROVIDERS and source.is_config(config_path):
                return _label(source.full_path(), config_path)
        return f"{config_path}.yaml"


class Loader:
    """One search path: the folder or package `root`, then the house's tree if that is another, then the folder `extra`.

    Raises FAILURES.
    """

    def __init__(self, root: str, name: str, extra: str) -> None:
        version.setbase(VERSION_BASE)
        # The defaults list wants to find it; types are ours (conf.typed), and the real one takes a third of the time.
        ConfigStore.instance().store(name=SCHEMA_NAME, node={})
        path = create_config_search_path(root)
        before_schema = SearchPathQuery(provider="schema")
        if root != HOUSE_ROOT:
            path.prepend("house", HOUSE_ROOT, anchor=before_schema)
        if extra:
            path.prepend("command-line", f"file://{os.path.abspath(extra)}", anchor=before_schema)
        self.name = name
        self._composed: dict[tuple[Any, ...], tuple[list[TreeFile], dict[str, str]]] = {}
        self._unreadable: list[tuple[str, OSError]] = []
        self._loader = ConfigLoaderImpl(path)
        self._parser = OverridesParser.create(config_loader=self._loader)
        self._repository = Repository(self._loader.repository)

    def parse(self, text: str) -> Override:
        """One override in Hydra's grammar."""
        return self._parser.parse_overrides([text])[0]

    def search_also(self, overrides: Sequence[Override]) -> None:
        """Honour `hydra.searchpath`, of the command line or else of the root file; ask `missing_folders` afterwards."""
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            self._loader._process_config_searchpath(self.name, list(overrides), self._repository)

    def missing_folders(self) -> list[str]:
        """A sentence for each entry of the search path that does not exist."""
        sources = self._repository.get_sources()
        missing = [source for source in sources if source.provider != "schema" and not source.available()]
        return [f"{ASKED_BY.get(source.provider, SEARCH_PATH)}: there is no folder {source.path}" for source in missing]

    def has_root_file(self) -> bool:
        return bool(self._repository.config_exists(self.name))

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """{"model": ["demo", ...], "experiment/team": [...], ...}: folders of the search path with YAML files in them."""
        found: dict[str, set[str]] = {}
        for source in self._repository.get_sources():
            if source.provider not in HYDRA_PROVIDERS and source.available():
                for group, choice in _choices(_folder(source.scheme(), source.path), "", self._unreadable):
                    found.setdefault(group, set()).add(choice)
        return {group: sorted(found[group]) for group in sorted(found)}

    def unreadable_folders(self) -> list[str]:
        """Folders that may hold choices and cannot be listed: those of the search path, and groups of a known name."""
        known = self.groups
        return [
            f"{error.filename}: {error.strerror}" for group, error in self._unreadable if not group or group in known
        ]

    def files(self, overrides: Sequence[Override]) -> tuple[list[TreeFile], dict[str, str]]:
        """The files that these choices of groups bring in, in the order in which they apply; and the choice of each group.

        A group that the root file lists is overridden, any other is added, whether a plus was typed or not.
        """
        key = tuple((override.type, override.get_key_element(), str(override.value())) for override in overrides)
        if key not in self._composed:
            self._composed[key] = self._files(overrides)
        return self._composed[key]

    def _files(self, overrides: Sequence[Override]) -> tuple[list[TreeFile], dict[str, str]]:
        listed = self._defaults([]).overrides.known_choices
        sound = [_with_sound_prefix(override, listed) for override in overrides]
        try:
            defaults = self._defaults(sound)
        except HydraException as error:
            # An experiment may list groups of its own, which the root file knows nothing of: then the plus counts as typed.
            defaults = self._defaults_as_typed(overrides, sound, error)
        choices = {group: choice for group, choice in defaults.overrides.known_choices.items() if choice is not None}
        return [self._read(default) for default in defaults.defaults if default.config_path != SCHEMA_NAME], choices

    def shadowed(self, label: str) -> str:
        """The file that `label` of the house's tree hides, because Hydra takes the first on its search path; or ""."""
        if not label.startswith("conf/"):
            return ""
        name = label.removeprefix("conf/")
        house = str(resources.files("conf").joinpath(name))
        for source in self._repository.get_sources():
            if source.provider not in (*HYDRA_PROVIDERS, "main", "house") and source.is_config(name):
                file = _label(source.full_path(), name)
                # --config-dir may name the house's tree itself, by whatever path.
                return "" if file == label or os.path.realpath(file) == os.path.realpath(house) else file
        return ""

    def naming(self, choice: str, overrides: Sequence[Override]) -> str:
        """The chosen file whose defaults list names `choice`, which Hydra forgets by the time it looks for it; or ""."""
        for override in overrides:
            name = f"{override.key_or_group}/{override.value()}"
            found = self._repository.load_config(name)
            listed = (found.defaults_list or []) if found else []
            if found and any(isinstance(default, GroupDefault) and default.value == choice for default in listed):
                return _label(found.path, name)
        return ""

    def _defaults(self, overrides: Sequence[Override]) -> DefaultsList:
        return create_defaults_list(
            repo=self._repository,
            config_name=self.name,
            overrides_list=list(overrides),
            prepend_hydra=False,
            skip_missing=False,
        )

    def _defaults_as_typed(
        self, overrides: Sequence[Override], sound: Sequence[Override], error: HydraException
    ) -> DefaultsList:
        """Raises `error` when that is no better."""
        if list(overrides) == list(sound):
            raise error
        try:
            return self._defaults(overrides)
        except HydraException:
            raise error from None

    def _read(self, default: ResultDefault) -> TreeFile:
        assert default.config_path is not None
        found = self._loader._load_single_config(default, self._repository)
        values = OmegaConf.to_container(found.config, resolve=False)
        assert isinstance(values, dict)  # see Repository
        return TreeFile(_label(found.path, default.config_path), {str(key): value for key, value in values.items()})


def arguments_parser() -> argparse.ArgumentParser:
    """Hydra's own command line: --cfg, --multirun, --config-dir, ..., and the overrides."""
    return get_args_parser()


def hydra_main(arguments: Sequence[str]) -> int:
    """Let Hydra answer for itself: --info, --cfg hydra, --hydra-help, --version, --shell-completion. It may exit.

    Raises FAILURES: Hydra would print most of them with a stack trace, which this variable of its own prevents.
    """
    import hydra

    os.environ["HYDRA_FULL_ERROR"] = "1"

    def nothing(_config: Any) -> None:
        """Hydra runs nothing of ours."""

    ConfigStore.instance().store(name=SCHEMA_NAME, node=LibraConfig)
    sys.argv[1:] = arguments
    hydra.main(version_base=VERSION_BASE, config_path=HOUSE_ROOT, config_name="config")(nothing)()
    return 0


def _with_sound_prefix(override: Override, listed: dict[str, Any]) -> Override:
    if override.is_delete():
        return override
    is_listed = override.get_key_element().lstrip("+") in listed
    return replace(override, type=OverrideType.CHANGE if is_listed else OverrideType.ADD)


def _folder(scheme: str, path: str) -> Any:
    return resources.files(path) if scheme == "pkg" else Path(path)


def _choices(
    folder: Any, group: str, unreadable: list[tuple[str, OSError]], depth: int = 2
) -> Iterator[tuple[str, str]]:
    """(group, choice) of every YAML file in the folders below `folder`. Two levels: a run directory is deep and wide.

    Folders that cannot be listed are added to `unreadable`, with their group.
    """
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        unreadable.append((group, error))
        return
    for entry in entries:
        name = entry.name
        if group and name.endswith(".yaml") and name != "_self_.yaml" and _is(entry.is_file):
            yield group, name.removesuffix(".yaml")
        elif depth and not name.startswith(("_", ".")) and _is(entry.is_dir):
            yield from _choices(entry, f"{group}/{name}".lstrip("/"), unreadable, depth - 1)


def _is(kind: Callable[[], bool]) -> bool:
    """False for what nobody may look at: pathlib raises then."""
    try:
        return kind()
    except OSError:
        return False


def _label(source: str, name: str) -> str:
    """conf/model/demo.yaml for the house's files, the absolute path for a user's."""
    scheme, _, place = source.partition("://")
    file = f"{name.removesuffix('.yaml')}.yaml"
    return f"{place.replace('.', '/')}/{file}" if scheme == "pkg" else os.path.join(os.path.abspath(place), file)
