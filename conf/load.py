"""Read a run's config.yaml back into the schema."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from conf.schema import LibraConfig
from conf.typed import WrongTypeError, assemble, convert, leaves, options


class WrongConfigFileError(ValueError):
    """A configuration file with options that do not exist, or values of another type than declared."""


def load(path: Path) -> LibraConfig:
    """The configuration in `path`; an option that it leaves out has its default.

    Raises WrongConfigFileError with everything that is wrong, OSError and yaml.YAMLError for what is not YAML, and omegaconf
    errors for interpolations that lead nowhere.
    """
    node = OmegaConf.load(path)
    if not isinstance(node, DictConfig):
        raise WrongConfigFileError(f"{path} holds no options but a list")
    given = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    assert isinstance(given, dict)
    values, problems = {}, []
    for name, value in leaves(given):
        try:
            values[name] = convert(options()[name], value)
        except KeyError:
            problems.append(f"unknown option '{name}'")
        except WrongTypeError as error:
            problems.append(f"{name}={value!r}: {error}")
    if problems:
        raise WrongConfigFileError(f"{path}: {'; '.join(problems)}")
    return assemble(values)
