"""Strict types: what a YAML file or a command line gives becomes the declared type of its option, or is refused.

OmegaConf would turn 8.7 GPUs into 8 and an account 007 into 7. Here text is text, a whole number is a whole number, and
only numbers that arrive as text (from `${oc.env:...}`, say) are read as the number that the option declares.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from conf.options import LARGEST_FLOAT, LARGEST_INT, Option, declared
from conf.schema import LibraConfig

DEEPEST = 20
"""Lists and mappings inside one another; OmegaConf and Python's own stack end somewhere beyond."""
YES = frozenset({"true", "yes", "on"})
NO = frozenset({"false", "no", "off"})
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
MANY = {int: "whole numbers", float: "numbers", str: "texts", bool: "true or false"}
Number = TypeVar("Number", int, float)
EXAMPLES = {int: "[1,2]", float: "[0.5,1]", str: "[a,b]", bool: "[true,false]"}


class WrongTypeError(ValueError):
    """A value that is not of its option's type; the message says what is wanted."""


@cache
def options() -> Mapping[str, Option]:
    """Every declared option by dotted name."""
    return declared(LibraConfig)


@cache
def sections() -> frozenset[str]:
    """Dotted names of the groups of options, such as "algorithm"."""
    parents = (name.split(".")[:-1] for name in options())
    return frozenset(".".join(parts[:count]) for parts in parents for count in range(1, len(parts) + 1))


def leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything that `values` sets. Sections are entered, options are not; names may be unknown."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in sections() and isinstance(value, Mapping):
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


def convert(option: Option, value: Any) -> Any:
    """`value` as the type that `option` declares. Raises WrongTypeError."""
    if value is None:
        if option.is_optional:
            return None
        raise WrongTypeError(wanted(option))
    try:
        if option.is_list:
            return [_scalar(option.element_type, element) for element in _list(value)]
        if _is_mapping(option):
            return _plain(value, needs_mapping=True)
        return _scalar(option.element_type, value)
    except TypeError:
        raise WrongTypeError(wanted(option) + _hint(option, value)) from None
    except OverflowError:
        largest = f"{LARGEST_INT} (2^53)" if option.element_type is int else f"{LARGEST_FLOAT:g}"
        raise WrongTypeError(f"{wanted(option)} of at most {largest}") from None


def wanted(option: Option) -> str:
    """What a value of `option` has to be, with its unit: "wanted a whole number (GPUs)"."""
    unit = f" ({option.unit})" if option.unit not in ("", "switch", "choice") else ""
    if option.is_list:
        return f"wanted a list of {MANY[option.element_type]}{unit} such as {EXAMPLES[option.element_type]}"
    if _is_mapping(option):
        return f"wanted a mapping{unit} such as {{name: value}}"
    return f"wanted {KINDS[option.element_type]}{unit}{' or null' if option.is_optional else ''}"


def assemble(values: Mapping[str, Any]) -> LibraConfig:
    """The configuration with these converted values by dotted name; what is missing has its default."""
    config = _assemble(LibraConfig, values, "")
    assert isinstance(config, LibraConfig)
    return config


def _assemble(root: type, values: Mapping[str, Any], prefix: str) -> Any:
    given: dict[str, Any] = {}
    for name, kind in _annotations(root).items():
        if is_dataclass(kind):
            assert isinstance(kind, type)
            given[name] = _assemble(kind, values, f"{prefix}{name}.")
        elif prefix + name in values:
            given[name] = values[prefix + name]
    return root(**given)


@cache
def _annotations(root: type) -> dict[str, Any]:
    hints = typing.get_type_hints(root)
    return {spec.name: hints[spec.name] for spec in fields(root)}


def _is_mapping(option: Option) -> bool:
    return typing.get_origin(option.type) is dict


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


def _scalar(kind: type, value: Any) -> Any:
    """Raises TypeError or OverflowError for what is not a `kind`."""
    if kind is bool:
        return _switch(value)
    if kind is str and isinstance(value, str) and is_text(value):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and isinstance(value, int) and is_number:
        return _sized(value)
    if kind is int and isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
        return _sized(_whole(value))
    if kind is float and is_number:
        return _sized(float(value))
    if kind is float and isinstance(value, str):
        return _sized(_number(value))
    raise TypeError


def is_text(text: str) -> bool:
    """False for what no path, argument or UTF-8 file can hold: a NUL, and the lone surrogates by which Python carries bytes
    of the command line and of paths that are no UTF-8."""
    return not any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text)


def _sized(value: Number) -> Number:
    """Raises OverflowError for more than an option may be; nan and inf, which no range lets pass, have no size."""
    largest = LARGEST_INT if isinstance(value, int) else LARGEST_FLOAT
    if abs(value) > largest and value not in (math.inf, -math.inf):
        raise OverflowError
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise TypeError from None


def _whole(digits: str) -> int:
    """Raises OverflowError for more digits than Python converts."""
    try:
        return int(digits)
    except ValueError:
        raise OverflowError from None


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if isinstance(value, int) and text in ("0", "1"):
        return text == "1"
    if isinstance(value, str) and text in YES | NO:
        return text in YES
    raise TypeError


def _plain(value: Any, *, needs_mapping: bool = False) -> Any:
    """A copy of nested dicts with text as keys, lists and plain values. Raises TypeError for anything else."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) and is_text(key) for key in value):
            raise TypeError
        return {key: _plain(element) for key, element in value.items()}
    if needs_mapping:
        raise TypeError
    if isinstance(value, list):
        return [_plain(element) for element in value]
    if isinstance(value, str) and not is_text(value):
        raise TypeError
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError


def is_too_deep(value: Any, levels: int = DEEPEST) -> bool:
    """Has `value` more than `levels` lists and mappings inside one another? Also true for one that holds itself."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_too_deep(element, levels - 1) for element in inner)


def _hint(option: Option, value: Any) -> str:
    """How to say what was probably meant."""
    values = value if isinstance(value, list) else [value]
    if option.element_type is str and any(isinstance(element, int | float | bool) for element in values):
        return ", in quotes"
    if _is_mapping(option) and isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return ", with text as names"
    if not all(is_text(text) for text in _texts(value)):
        return ", in UTF-8 and without NUL"
    return ""


def _texts(value: Any) -> Iterator[str]:
    """Every text in `value`, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from (text for element in value for text in _texts(element))
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for element in pair for text in _texts(element))
