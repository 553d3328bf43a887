"""How an option is declared: a dataclass field with unit, range and effect in its metadata."""

from __future__ import annotations

from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any


def option(
    default: Any = MISSING,
    *,
    effect: str,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    factory: Any = MISSING,
) -> Any:
    """A dataclass field that documents itself.

    `minimum` and `maximum` are inclusive. `choices` lists the only accepted strings. `effect` is one sentence about
    what changes when a user sets it.
    """
    metadata = {"effect": effect, "unit": unit, "minimum": minimum, "maximum": maximum, "choices": choices}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


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
