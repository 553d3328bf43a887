"""Where the configuration is read from: the house's tree, or a user's folders in front of and beside it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from launch.errors import ConfigError
from launch.hydra_internals import FAILURES, HOUSE_ROOT, Loader


@dataclass(frozen=True)
class Tree:
    """`name`.yaml in `root` (a folder, or a package as pkg://NAME) is the root file; `extra` is one more folder of groups."""

    root: str = HOUSE_ROOT
    name: str = "config"
    extra: str = ""

    def loader(self) -> Loader:
        """Raises ConfigError when a folder or the root file is not there."""
        if self.extra and not os.path.isdir(self.extra):
            raise ConfigError(
                [f"--config-dir={self.extra} is not a folder; it holds experiment/NAME.yaml and the like"]
            )
        if "://" not in self.root and not os.path.isfile(os.path.join(self.root, f"{self.name}.yaml")):
            raise ConfigError([f"--config-path={self.root} has no {self.name}.yaml{_others(Path(self.root))}"])
        try:
            loader = Loader(self.root, self.name, self.extra)
            has_root_file = loader.has_root_file()
        except FAILURES as error:
            raise ConfigError([f"--config-path={self.root} cannot be read: {' '.join(str(error).split())}"]) from error
        if not has_root_file:
            raise ConfigError([f"--config-name={self.name}: there is no such file in {self.root}"])
        return loader


HOUSE = Tree()


def tree_at(config_path: str | None, config_name: str | None, config_dir: str | None) -> Tree:
    """From Hydra's flags. `config_path` may also be the root file itself, such as RUN/config.yaml. Raises ConfigError."""
    given = {"--config-path": config_path, "--config-name": config_name, "--config-dir": config_dir}
    if empty := [flag for flag, value in given.items() if value == ""]:
        raise ConfigError([f"{' and '.join(empty)} is empty; name a place, or leave it out"])
    root, name = config_path or HOUSE_ROOT, (config_name or "config").removesuffix(".yaml")
    if "://" not in root:
        place = Path(root).absolute()
        if os.path.isfile(place) and config_name is None:
            place, name = place.parent, place.name.removesuffix(".yaml")
        root = str(place)
    return Tree(root, name, str(Path(config_dir).absolute()) if config_dir else "")


def groups(tree: Tree = HOUSE) -> dict[str, list[str]]:
    """The choices of each config group, a user's with the house's: {"model": ["demo", ...], ...}."""
    return tree.loader().groups


def _others(folder: Path) -> str:
    names = sorted(path.stem for path in folder.glob("*.yaml")) if os.path.isdir(folder) else []
    return f"; it has {', '.join(names)} (--config-name)" if names else ""
