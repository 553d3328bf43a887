"""A value as the published system has it becomes one of the type that an option of Libra has."""

from __future__ import annotations

import math
from typing import Any

from conf import typed
from conf.import_reference.errors import WrongValueError
from conf.options import Option

TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0", ""})
TEXT_NUMBER = "the published system kept it as text; a number is written"
TEXT_SWITCH = "any text counted as true there; the switch that it spells is written"


def convert(option: Option, value: Any) -> tuple[Any, str]:
    """(value for `option`, why it differs from the given one or ""). Raises WrongValueError when it means nothing there."""
    if option.is_optional and value == math.inf:
        return None, "no limit is written as null"
    converted, why = _list(option, value) if option.is_list else _scalar(option.element_type, value)
    try:
        return typed.convert(option, converted), why
    except typed.WrongTypeError as error:  # a number that is too large, a text that no file can hold
        raise WrongValueError(f"{value!r}: {error}") from None


def _list(option: Option, value: Any) -> tuple[list[Any], str]:
    if not isinstance(value, list):
        raise WrongValueError(f"{value!r} is not a list")
    pairs = [_scalar(option.element_type, element) for element in value]
    return [converted for converted, _ in pairs], next((why for _, why in pairs if why), "")


def _scalar(kind: Any, value: Any) -> tuple[Any, str]:
    if kind is bool:
        return to_switch(value)
    if kind is int:
        return _to_whole(value)
    if kind is float:
        return _to_float(value)
    return _to_text(value)


def to_switch(value: Any) -> tuple[bool, str]:
    """(switch, why it differs). Raises WrongValueError for what is neither true nor false."""
    if isinstance(value, bool):
        return value, ""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in TRUE_WORDS | FALSE_WORDS:
            return word in TRUE_WORDS, TEXT_SWITCH
    elif value in (0, 1):
        return bool(value), "a switch is written as true or false"
    raise WrongValueError(f"{value!r} is neither true nor false")


def _to_whole(value: Any) -> tuple[int, str]:
    number, why = _to_float(value)
    if not number.is_integer():
        raise WrongValueError(f"{value!r} is not a whole number")
    if isinstance(value, int):
        return value, ""
    return int(number), why or "a whole number is written without a point"


def _to_float(value: Any) -> tuple[float, str]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise WrongValueError(f"{value!r} is not a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise WrongValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number):
        raise WrongValueError(f"{value!r} is not a finite number")
    return number, TEXT_NUMBER if isinstance(value, str) else ""


def _to_text(value: Any) -> tuple[str, str]:
    if isinstance(value, bool | list | dict):
        raise WrongValueError(f"{value!r} is not text")
    text = str(value)
    if text == "???":
        raise WrongValueError("'???' is how Hydra writes a value that is still missing")
    if isinstance(value, str):
        return text, ""
    return text, "text is written as text; an unquoted number or date was read"
