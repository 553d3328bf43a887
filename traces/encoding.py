"""JSON text of single values, fast and never invalid: the recorder's inner loop.

A whole-record `json.dumps` costs about three times as much as these pieces put together by an f-string.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache


@lru_cache(maxsize=4096)
def quote(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text)


def encode_optional_int(value: int | None) -> str:
    """A JSON integer, or null."""
    return "null" if value is None else str(int(value))


def encode_number(value: float) -> str:
    """A JSON number; null for values JSON does not have (NaN, infinities)."""
    if isinstance(value, int):
        return str(int(value))
    number = float(value)
    return repr(number) if math.isfinite(number) else "null"


def encode_details(details: dict[str, object]) -> str:
    """A JSON object. Values JSON does not have become strings; array scalars (numpy, torch) become numbers."""
    if not details:
        return "{}"
    try:
        return "{" + ",".join([f"{quote(key)}:{_encode(value)}" for key, value in details.items()]) + "}"
    except (TypeError, ValueError):  # keys that are not strings, NaN, infinities, cycles
        return _encoder.encode(_made_plain(details, depth=0))


def _encode(value: object) -> str:
    kind = type(value)
    if kind is int:
        return str(value)
    if kind is str:
        return json.dumps(value)
    if kind is float and math.isfinite(value):  # type: ignore[arg-type]
        return repr(value)
    return _encoder.encode(value)


def _made_plain(value: object, depth: int) -> object:
    if depth > 8:
        return repr(value)[:200]
    if isinstance(value, dict):
        return {str(key): _made_plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_made_plain(item, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else _made_plain(_foreign(value), depth + 1)


def _foreign(value: object) -> object:
    """A value that the encoder does not know, as one that it does."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        return item()
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_foreign)
