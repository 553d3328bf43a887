"""What can become of one option of the published system, and what a rule may look at to decide it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from conf.import_reference.errors import WrongValueError
from conf.import_reference.published import DEFAULTS
from conf.import_reference.values import to_switch
from conf.options import declared
from conf.schema import LibraConfig

OPTIONS = declared(LibraConfig)
"""Every option of Libra, by dotted name."""


class Kind(Enum):
    """In the order of the report."""

    KEPT = "kept"
    RENAMED = "renamed"
    FIXED = "fixed"
    DROPPED = "dropped"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Outcome:
    """`to` maps options of Libra to values; `why` is one clause for a person. `todo` is what the user has to see to."""

    kind: Kind
    to: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    todo: str = ""


class Published:
    """The settings of one input, with the published default for what it does not give (or gives as null)."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.given = {name: value for name, value in settings.items() if value is not None}

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, DEFAULTS[name])

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def number(self, name: str) -> float:
        """The value as a number; the published default when it is none."""
        value = self[name]
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            return float(DEFAULTS[name] or 0)

    def whole(self, name: str) -> int:
        value = self.number(name)
        return int(value) if value.is_integer() else int(DEFAULTS[name] or 0)

    def switch(self, name: str) -> bool:
        """What a person means by the value; text other than a word for false counts as true, as it did there."""
        value = self[name]
        try:
            return to_switch(value)[0]
        except WrongValueError:
            return bool(value)


Rule = Callable[[Published, str], Outcome]
"""Called with the settings and the published name of the option."""


def same(view: Published, name: str) -> Outcome:
    """The option has the same name and meaning."""
    return Outcome(Kind.KEPT, {name: view[name]})


def to(*targets: str) -> Rule:
    """The same value under other names."""
    return lambda view, name: Outcome(Kind.RENAMED, dict.fromkeys(targets, view[name]))


def drop(why: str, todo: str = "") -> Rule:
    """Nothing in Libra has its effect, or nothing needs to."""
    return lambda view, name: Outcome(Kind.DROPPED, why=why, todo=todo)


def at_least(floor: float) -> Rule:
    """The published system raised smaller values to `floor` in silence."""

    def rule(view: Published, name: str) -> Outcome:
        if view.number(name) >= floor:
            return same(view, name)
        return Outcome(Kind.FIXED, {name: floor}, f"the published system raised it to {floor:g} as well, in silence")

    return rule


def timeout(target: str) -> Rule:
    """Seconds; 0 or less meant for ever, and Libra has no wait without an end."""

    def rule(view: Published, name: str) -> Outcome:
        if view.number(name) > 0:
            return Outcome(Kind.KEPT if target == name else Kind.RENAMED, {target: view[name]})
        return Outcome(Kind.FIXED, {target: OPTIONS[target].default}, "0 waited for ever; every wait has an end here")

    return rule


def only(value: str, why: str) -> Rule:
    """One choice is left."""

    def rule(view: Published, name: str) -> Outcome:
        return same(view, name) if view[name] == value else Outcome(Kind.FIXED, {name: value}, why)

    return rule


def one_of(choices: tuple[str, ...], otherwise: str, why: str) -> Rule:
    def rule(view: Published, name: str) -> Outcome:
        if view[name] in choices:
            return same(view, name)
        return Outcome(Kind.FIXED, {name: otherwise}, why)

    return rule
