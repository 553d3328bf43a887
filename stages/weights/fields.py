"""Typed reading of JSON records: every field is asked for once, and what is left over is an error too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stages.rundir import STAMPS
from stages.weights.errors import RecordError


class Fields:
    """One record being read. Each method raises RecordError naming the record, the field, wanted and found."""

    def __init__(self, record: Mapping[str, Any], what: str) -> None:
        self._left = {key: value for key, value in record.items() if key not in STAMPS}
        self._what = what

    def error(self, name: str, problem: str) -> RecordError:
        return RecordError(self._what, name, problem)

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise self.error(name, "missing")
        return self._left.pop(name)

    def integer(self, name: str, minimum: int = 0, maximum: int | None = None) -> int:
        value = self.take(name)
        if type(value) is not int or value < minimum:
            raise self.error(name, f"wanted an integer >= {minimum}, got {value!r}")
        if maximum is not None and value > maximum:
            raise self.error(name, f"wanted an integer <= {maximum}, got {value!r}")
        return value

    def number(self, name: str, minimum: float = 0.0) -> float:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < minimum:
            raise self.error(name, f"wanted a finite number >= {minimum}, got {value!r}")
        return float(value)

    def text(self, name: str, choices: tuple[str, ...] = (), *, empty: bool = False) -> str:
        value = self.take(name)
        if not isinstance(value, str) or (not value and not empty):
            raise self.error(name, f"wanted a text, got {value!r}")
        if choices and value not in choices:
            raise self.error(name, f"wanted one of {', '.join(choices)}, got {value!r}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.take(name)
        if not isinstance(value, dict):
            raise self.error(name, f"wanted an object, got {value!r}")
        return value

    def integers(self, name: str, minimum: int = 0) -> tuple[int, ...]:
        value = self.take(name)
        if not isinstance(value, list) or any(type(item) is not int or item < minimum for item in value):
            raise self.error(name, f"wanted a list of integers >= {minimum}, got {value!r}")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.take(name)
        if not isinstance(value, list) or any(
            isinstance(item, bool) or not isinstance(item, int | float) or not math.isfinite(item) for item in value
        ):
            raise self.error(name, f"wanted a list of finite numbers, got {value!r}")
        return tuple(float(item) for item in value)

    def counts(self, name: str) -> dict[str, int]:
        value = self.mapping(name)
        if any(type(count) is not int or count < 1 for count in value.values()):
            raise self.error(name, f"wanted counts of at least 1, got {value!r}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.take(name)
        if not isinstance(value, list) or any(not isinstance(item, str) or not item for item in value):
            raise self.error(name, f"wanted a list of texts, got {value!r}")
        return tuple(value)

    def finish(self) -> None:
        """Call last: a field that nobody asked for is a misspelt one."""
        if self._left:
            raise self.error(min(self._left), "unknown field")
