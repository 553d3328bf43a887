"""How an option is declared: a dataclass field with unit, range and effect in its metadata."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

LARGEST_INT = 2**53
"""No option counts more than this, and a float still holds it exactly."""
LARGEST_FLOAT = 1e30
"""What is computed from options multiplies a few of them: far below the largest float."""
LARGEST_OF_UNIT = {"s": 1e9, "min": 1e7, "GPUs": 100_000}
"""Where the declaration gives no other maximum. 1e9 s are 30 years; the waits of Python and of the system end at 9e9. The
planner looks at every division of the GPUs."""


def option(
    default: Any = MISSING,
    *,
    effect: str,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    reason: str = "",
    factory: Any = MISSING,
) -> Any:
    """A dataclass field that documents itself.

    `effect` is one sentence about what changes when a user sets it; `reason` says why the default is what it is, where
    that is not obvious. `minimum` and `maximum` are inclusive, `above` is an exclusive lower bound; for a list they hold
    for each element. `choices` lists the only accepted strings. `unit` may be left out for switches and choices; some units
    bring a maximum with them.
    """
    metadata = {
        "effect": effect,
        "unit": unit,
        "minimum": minimum,
        "maximum": LARGEST_OF_UNIT.get(unit) if maximum is None else maximum,
        "above": above,
        "choices": choices,
        "reason": reason,
    }
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One declared option. `type` is the resolved annotation; a None in `minimum`, `maximum`, `above` is no bound."""

    name: str
    type: Any
    default: Any
    effect: str
    unit: str
    minimum: float | None
    maximum: float | None
    above: float | None
    choices: tuple[str, ...]
    reason: str

    @property
    def element_type(self) -> Any:
        """The scalar type: of the elements for a list, without None for an optional one."""
        if get_origin(self.type) is list:
            return get_args(self.type)[0]
        if get_origin(self.type) in (types.UnionType, typing.Union):
            return next(kind for kind in get_args(self.type) if kind is not type(None))
        return self.type

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is list

    @property
    def is_optional(self) -> bool:
        return type(None) in get_args(self.type)


def walk(config: Any, prefix: str = "") -> list[tuple[str, Field[Any], Any]]:
    """Every leaf option of a config object as (dotted name, field, value)."""
    found: list[tuple[str, Field[Any], Any]] = []
    for spec in fields(config):
        value = getattr(config, spec.name)
        name = f"{prefix}{spec.name}"
        if is_dataclass(value):
            found.extend(walk(value, f"{name}."))
        else:
            found.append((name, spec, value))
    return found


@cache
def declared(root: type) -> Mapping[str, Option]:
    """Every leaf option below the config class `root`, by dotted name, in the order of declaration."""
    return {found.name: found for found in _declared(root, "")}


def _declared(root: type, prefix: str) -> Iterator[Option]:
    annotations = typing.get_type_hints(root)
    for spec in fields(root):
        kind = annotations[spec.name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            yield from _declared(kind, f"{prefix}{spec.name}.")
            continue
        default = spec.default if spec.default is not MISSING else _made(spec)
        yield Option(name=prefix + spec.name, type=kind, default=default, **_described(spec, kind))


def _made(spec: Field[Any]) -> Any:
    assert spec.default_factory is not MISSING
    return spec.default_factory()


def _described(spec: Field[Any], kind: Any) -> dict[str, Any]:
    meta = dict(spec.metadata)
    if not meta["unit"] and kind is bool:
        meta["unit"] = "switch"
    if not meta["unit"] and meta["choices"]:
        meta["unit"] = "choice"
    return meta
