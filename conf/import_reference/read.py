"""Files of the published system become one flat set of settings, by the rules of its loader.

Three keys include other files, relative to the file that names them: `base_config` (which may include others in turn),
`hardware_config` (into `hardware`) and `model_arch_config` (into `model_arch`). The base comes first, then those two, then
the file's own keys. Mappings merge deeply; lists and scalars replace.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conf.import_reference.errors import ImportReferenceError

MAX_FILE_BYTES = 1_000_000
MAX_FILES = 100
MAX_DEPTH = 20
MAX_VALUES = 50_000
YAML_SUFFIXES = (".yaml", ".yml")
INCLUDED_SECTIONS = {"hardware_config": "hardware", "model_arch_config": "model_arch"}
SECTIONS = ("hardware", "model_arch", "profiling", "heterogeneous_rollout", "global_resource_planner")
SUBSECTIONS = ("heterogeneous_rollout.scheduling", "heterogeneous_rollout.gpu")
INSTANCES = "heterogeneous_rollout.instances"


@dataclass(frozen=True)
class Layer:
    """The keys that one file contributes, before merging. A `hardware_config` file appears below its section."""

    file: Path
    tree: Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """`settings` maps dotted names to values; an option of rollout instances maps to the list of its values.

    `origins` names the file whose value counts. `files` are in the order in which they were merged; the last one is the
    file that was asked for.
    """

    settings: Mapping[str, Any]
    origins: Mapping[str, Path]
    files: tuple[Path, ...]


def read(file: Path) -> Source:
    """Everything that `file` says, with the files it includes. Raises ImportReferenceError."""
    layers = tuple(_layers(file, ()))
    merged: dict[str, Any] = {}
    origins: dict[str, Path] = {}
    for layer in layers:
        merged = _merge(merged, layer.tree)
        origins |= dict.fromkeys((name for name, _ in _flat(layer.tree)), layer.file)
    return Source(dict(_flat(merged)), origins, tuple(layer.file for layer in layers))


def _layers(file: Path, above: tuple[Path, ...]) -> Iterator[Layer]:
    real = Path(os.path.realpath(file))
    if real in above:
        chain = " -> ".join(path.name for path in (*above, real))
        raise ImportReferenceError(f"base_config goes round in a circle: {chain}")
    if len(above) >= MAX_FILES:
        raise ImportReferenceError(f"{file}: more than {MAX_FILES} files include one another through base_config")
    raw = load(file)
    base = _included(raw, "base_config", file)
    if base is not None:
        yield from _layers(base, (*above, real))
    for key, section in INCLUDED_SECTIONS.items():
        included = _included(raw, key, file)
        if included is not None:
            yield Layer(included, {section: load(included)})
    reserved = {"base_config", *INCLUDED_SECTIONS}
    yield Layer(file, {key: value for key, value in raw.items() if key not in reserved})


def _included(raw: Mapping[str, Any], key: str, file: Path) -> Path | None:
    given = raw.get(key)
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise ImportReferenceError(f"{file}: {key}={given!r} is not the path of a file")
    path = Path(given) if Path(given).is_absolute() else file.parent / given
    if not os.path.isfile(path):
        raise ImportReferenceError(f"{file}: {key}={given}: there is no file {path}")
    return path


def load(file: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, keys as text. Raises ImportReferenceError with the line where it breaks."""
    if not os.path.isfile(file):
        raise ImportReferenceError(f"there is no file {file}")
    suffix = file.suffix.lower()
    if suffix not in (*YAML_SUFFIXES, ".json"):
        raise ImportReferenceError(f"{file}: '{file.suffix}' is not one of .yaml, .yml, .json")
    text = _text(file)
    try:
        value = _parsed_json(text, file) if suffix == ".json" else _parsed_yaml(text, file)
        if value is not None and not isinstance(value, dict):
            raise ImportReferenceError(f"{file}: holds a {type(value).__name__}, not a mapping of options")
        plain = _plain(value or {}, file)
    except RecursionError:
        raise ImportReferenceError(f"{file}: nested too deeply; at most {MAX_DEPTH} levels are read") from None
    return dict(plain)


def _text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ImportReferenceError(f"{file}: larger than {MAX_FILE_BYTES} bytes; is it a configuration?")
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise ImportReferenceError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ImportReferenceError(f"{file}: not UTF-8 text (byte {error.start})") from error


class _StrictLoader(yaml.SafeLoader):
    """Plain values only, and no key twice: PyYAML would keep the last one and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' is given twice", key_node.start_mark)
            seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def _parsed_yaml(text: str, file: Path) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ImportReferenceError(f"{file}{where}: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise ImportReferenceError(f"{file}, line {line}: a character that YAML does not allow") from error
    except ValueError as error:  # a timestamp or number that has the form but not the value of one
        raise ImportReferenceError(f"{file}: {error}") from error


def _parsed_json(text: str, file: Path) -> Any:
    def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ImportReferenceError(f"{file}: '{twice}' is given twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=no_key_twice)
    except ImportReferenceError:
        raise
    except json.JSONDecodeError as error:
        raise ImportReferenceError(f"{file}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:  # a whole number with more digits than Python converts
        raise ImportReferenceError(f"{file}: {error}") from error


def _plain(value: Any, file: Path) -> Any:
    """A copy without shared parts: a few anchors of YAML can stand for more values than there is memory."""
    budget = iter(range(MAX_VALUES))

    def copied(node: Any, depth: int) -> Any:
        if next(budget, None) is None:
            raise ImportReferenceError(f"{file}: more than {MAX_VALUES} values; is it a configuration?")
        if depth > MAX_DEPTH:
            raise ImportReferenceError(f"{file}: nested too deeply; at most {MAX_DEPTH} levels are read")
        if isinstance(node, dict):
            return {str(key): copied(inner, depth + 1) for key, inner in node.items()}
        if isinstance(node, list | tuple | set):
            return [copied(inner, depth + 1) for inner in node]
        return node

    return copied(value, 0)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted name, value). Text that reads as a number is one inside a section, as in the published loader."""
    for key, value in tree.items():
        if key in SECTIONS:
            yield from _flat_section(key, value)
        else:
            yield _name(key), value


def _name(key: str) -> str:
    """A key that holds a dot or a bracket is quoted, so that it never looks like an option inside a section."""
    return repr(key) if set(key) & set(".[]") else key


def _flat_section(section: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if tree is None:
        return
    if not isinstance(tree, Mapping):
        raise ImportReferenceError(f"{section}={tree!r} is not a section: a mapping of options is needed there")
    for key, value in tree.items():
        name = f"{section}.{_name(key)}"
        if name in SUBSECTIONS:
            yield from _flat_section(name, value)
        elif name == INSTANCES:
            yield from _flat_instances(value)
        else:
            yield name, as_number(value)


def _flat_instances(instances: Any) -> Iterator[tuple[str, Any]]:
    """One setting for each option that some instance has: the list of its values."""
    columns: dict[str, list[Any]] = {}
    for instance in instances if isinstance(instances, list) else []:
        if not isinstance(instance, dict):
            columns.setdefault(f"{INSTANCES}[]", []).append(instance)
            continue
        for key, value in instance.items():
            columns.setdefault(f"{INSTANCES}[].{_name(key)}", []).append(as_number(value))
    yield from columns.items()
    if not columns:
        yield INSTANCES, instances


def as_number(value: Any) -> Any:
    """`value`, or the number that its text stands for: whole when it is written without point and exponent."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    whole = number.is_integer() and not set(value) & set(".eE")
    return int(number) if whole else number
