"""Which options a process has read: a configuration that looks like any other and remembers.

`track` puts every section into a subclass made for it, in which each leaf option is a descriptor. A descriptor, because
`__getattribute__` would slow down every access, also of methods, and a wrapper would be no dataclass. A subclass, because
isinstance, `fields`, `replace`, OmegaConf and equality then work as before; `replace` makes another instance of the same
subclass, so what is derived from a tracked configuration goes on counting. Pickled or copied, it is a plain one again.

A read counts by the module that makes it. Walks over all options (dataclasses, OmegaConf, copying, everything in `conf`) and
comments on values use none of them, so their reads say nothing. The rules in `planner.conflicts` do count: a draft is tracked to
learn which options a rule looks at. What a run reads is recorded in another one, made after the rules have passed.
"""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, cast

from conf.schema import LibraConfig

LOOKS_AT_ALL = ("conf", "copy", "copyreg", "dataclasses", "omegaconf", "pickle", "planner.notes", "planner.validate")
"""Modules, with what is below them, whose reads do not count."""


def track(config: LibraConfig) -> LibraConfig:
    """`config` with a record of what is read from it; costs about 0.2 us a read. A tracked one comes back as it is."""
    return config if isinstance(config, _Tracked) else cast(LibraConfig, _tracked(config, "", set()))


def reads_of(config: LibraConfig) -> frozenset[str]:
    """Dotted names of the options that were read so far, from `config` and all that was derived from it."""
    return frozenset(config.found) if isinstance(config, _Tracked) else frozenset()


class _Option:
    """One leaf option of one tracked section."""

    __slots__ = ("found", "name", "option")

    def __init__(self, name: str, option: str, found: set[str]) -> None:
        self.name, self.option, self.found = name, option, found

    def __get__(self, section: Any, owner: type | None = None) -> Any:
        if section is None:
            return self
        if self.option not in self.found and _is_use(sys._getframe(1).f_globals.get("__name__", "")):
            self.found.add(self.option)  # atomic, so threads need no lock
        return section.__dict__[self.name]

    def __set__(self, section: Any, value: Any) -> None:
        section.__dict__[self.name] = value


class _Tracked:
    """What the subclasses share. Equal to a plain section with the same values, and pickled as one."""

    found: ClassVar[set[str]]
    plain: ClassVar[type]

    def __eq__(self, other: object) -> bool:
        return bool(_untracked(self) == _untracked(other))

    __hash__ = None  # type: ignore[assignment]  # as every dataclass that can be changed

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain, tuple(_untracked(self.__dict__[spec.name]) for spec in fields(cast(Any, self)))


def _tracked(section: Any, prefix: str, found: set[str]) -> Any:
    plain = type(section)
    namespace: dict[str, Any] = {"__module__": __name__, "__qualname__": plain.__qualname__}
    namespace |= {"found": found, "plain": plain}
    values = {spec.name: getattr(section, spec.name) for spec in fields(section)}
    for name, value in values.items():
        if is_dataclass(value):
            values[name] = _tracked(value, f"{prefix}{name}.", found)
        else:
            namespace[name] = _Option(name, prefix + name, found)
    return type(plain.__name__, (_Tracked, plain), namespace)(**values)


def _untracked(section: Any) -> Any:
    if not isinstance(section, _Tracked):
        return section
    return section.plain(**{name: _untracked(value) for name, value in vars(section).items()})


@cache
def _is_use(module: str) -> bool:
    return not any(module == name or module.startswith(f"{name}.") for name in LOOKS_AT_ALL)
