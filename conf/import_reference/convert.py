"""One input, through the table: which options of Libra get which values, and an account of every key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from conf.import_reference.errors import WrongValueError
from conf.import_reference.mapping import ENGINE, SECTION_DEFAULTS, TABLE, WRITTEN_DEFAULTS
from conf.import_reference.published import DEFAULTS
from conf.import_reference.rules import OPTIONS, Kind, Outcome, Published
from conf.import_reference.values import convert as to_option
from conf.import_reference.values import to_switch
from conf.pending import pending

SECRET = "gradient_server_authkey"
"""Never shown: the key of its gradient servers."""
NOTHING_GIVEN = "null gives nothing; the published default counts"
CHOOSE_HARDWARE = (
    "hardware: the input does not describe the GPUs; hardware=... chooses a shipped file (h100_80g is the default)"
)
CHOOSE_MODEL = "model_path: the input has none"
CHOOSE_TASK = (
    "task: the published run took dataset_name={name!r}; until you choose one with task=..., the default task of"
    " conf/config.yaml is trained"
)


@dataclass(frozen=True)
class Entry:
    """One key of the input, or one published default that is written out."""

    name: str
    value: Any
    outcome: Outcome


@dataclass(frozen=True)
class Imported:
    """`entries` hold each key of the input once; `defaults` are published defaults that are written out.

    `options` maps options of Libra to values, in no order; `groups` maps config groups to the chosen file; `todo` is
    what the user has to see to.
    """

    entries: tuple[Entry, ...]
    defaults: tuple[Entry, ...]
    options: dict[str, Any]
    todo: tuple[str, ...]
    groups: dict[str, str] = field(default_factory=dict)

    @property
    def unknown(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.outcome.kind is Kind.UNKNOWN)


def convert(settings: Mapping[str, Any]) -> Imported:
    """`settings` by published name, as `read.Source` has them. Never raises for what a user wrote."""
    view = Published(settings)
    entries = tuple(Entry(name, value, _outcome(view, name, value)) for name, value in settings.items())
    settled = {option for entry in entries for option in entry.outcome.to}
    defaults = tuple(entry for entry in _defaults(view) if settled.isdisjoint(entry.outcome.to))
    engine = tuple(Entry("", value, Outcome(Kind.RENAMED, {option: value})) for option, value in ENGINE.items())
    options = {option: value for entry in (*engine, *defaults, *entries) for option, value in entry.outcome.to.items()}
    todo = [*_general_todo(view), *(entry.outcome.todo for entry in entries if entry.outcome.todo)]
    return Imported(entries, (*defaults, *engine), options, tuple(dict.fromkeys(todo)))


def _outcome(view: Published, name: str, value: Any) -> Outcome:
    rule = TABLE.get(name)
    if rule is None:
        return Outcome(Kind.UNKNOWN, why=_nearest(name))
    if value is None:
        return Outcome(Kind.DROPPED, why=NOTHING_GIVEN)
    outcome = rule(view, name)
    if not outcome.to:
        return outcome
    try:
        for element in value if "[]" in name else (value,):
            _check_kind(DEFAULTS[name], element)
        return _typed(outcome)
    except WrongValueError as error:
        target = next(iter(outcome.to))
        return Outcome(
            Kind.DROPPED,
            why=f"{error}; the published system would have failed where it used it",
            todo=f"{target}: {error}",
        )


def _check_kind(default: Any, value: Any) -> None:
    """Raises WrongValueError when `value` cannot stand where `default` does, before a rule's own value covers it."""
    if isinstance(default, bool):
        to_switch(value)
    elif isinstance(default, int | float):
        try:
            float(value)
        except (TypeError, ValueError, OverflowError):
            raise WrongValueError(f"{value!r} is not a number") from None


def _typed(outcome: Outcome) -> Outcome:
    """With values of the types that the options have. A value that needs what is not built yet is dropped."""
    to: dict[str, Any] = {}
    reasons = [outcome.why] if outcome.why else []
    fixed = outcome.kind is Kind.FIXED
    for target, value in outcome.to.items():
        to[target], why = to_option(OPTIONS[target], value)
        if why and why not in reasons:
            reasons.append(why)
            fixed = True
        sentence = pending().get(target)
        if sentence and to[target] != OPTIONS[target].default:
            return Outcome(Kind.DROPPED, why=sentence)
    return replace(outcome, kind=Kind.FIXED if fixed else outcome.kind, to=to, why="; ".join(reasons))


def _defaults(view: Published) -> Iterator[Entry]:
    wanted = list(WRITTEN_DEFAULTS)
    for section, names in SECTION_DEFAULTS.items():
        if any(name.startswith(f"{section}.") for name in view.given):
            wanted += [f"{section}.{name}" for name in names]
    for name in wanted:
        if name not in view:
            outcome = _outcome(view, name, DEFAULTS[name])
            if outcome.to:
                yield Entry(name, DEFAULTS[name], outcome)


def _general_todo(view: Published) -> Iterator[str]:
    if not view["model_path"]:
        yield CHOOSE_MODEL
    yield CHOOSE_TASK.format(name=view["dataset_name"])
    if not any(name.startswith("hardware.") for name in view.given):
        yield CHOOSE_HARDWARE


def _nearest(name: str) -> str:
    """ "did you mean ...?", by the whole name or by its last part, or ""."""
    bare = name.strip("'\"").rsplit(".", 1)[-1]
    by_leaf: dict[str, str] = {}
    for known in DEFAULTS:
        by_leaf.setdefault(known.rsplit(".", 1)[-1], known)
    if bare in by_leaf:
        return f"did you mean {by_leaf[bare]}?"
    close = difflib.get_close_matches(name, DEFAULTS, n=1, cutoff=0.8)
    if close:
        return f"did you mean {close[0]}?"
    leaf = difflib.get_close_matches(bare, by_leaf, n=1, cutoff=0.75)
    return f"did you mean {by_leaf[leaf[0]]}?" if leaf else ""
