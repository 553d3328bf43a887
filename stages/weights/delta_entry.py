"""The part of a manifest that says what a version was published against, when it was not published in full."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stages.weights.delta import Delta
from stages.weights.delta_chain import State
from stages.weights.fields import Fields


@dataclass(frozen=True)
class DeltaPart:
    """The payload of the part that begins at `start` in its tensor: `delta.bytes` bytes from `offset` of `file` on."""

    start: tuple[int, ...]
    file: str
    offset: int
    delta: Delta

    @property
    def end(self) -> int:
        return self.offset + self.delta.bytes

    def to_record(self) -> dict[str, Any]:
        return {**vars(self), "delta": self.delta.to_record()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> DeltaPart:
        fields = Fields(record, what)
        start, file, offset = fields.integers("start"), fields.text("file"), fields.integer("offset")
        part = cls(start, file, offset, Delta.from_record(fields.mapping("delta"), what))
        fields.finish()
        return part


@dataclass(frozen=True)
class DeltaEntry:
    """`base` is the version that payloads change; `links`: so many deltas in a row end with this one.

    `parts` holds, by tensor, what changed. A part of a tensor that is not named has the base's bytes.
    """

    base: State
    links: int
    parts: dict[str, tuple[DeltaPart, ...]]

    @classmethod
    def of(cls, base: State, links: int, parts: Iterable[tuple[str, DeltaPart]]) -> DeltaEntry:
        grouped: dict[str, list[DeltaPart]] = {}
        for name, part in parts:
            grouped.setdefault(name, []).append(part)
        ordered = {name: tuple(sorted(found, key=lambda part: part.start)) for name, found in sorted(grouped.items())}
        return cls(base, links, ordered)

    @property
    def bytes(self) -> int:
        """Of all payloads."""
        return sum(part.delta.bytes for parts in self.parts.values() for part in parts)

    def to_record(self) -> dict[str, Any]:
        parts = {name: [part.to_record() for part in parts] for name, parts in self.parts.items()}
        return {"base": dict(vars(self.base)), "links": self.links, "parts": parts}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> DeltaEntry:
        fields = Fields(record, what)
        base = Fields(fields.mapping("base"), f"{what}, base")
        state = State(base.integer("version"), base.text("digest"))
        base.finish()
        links, parts = fields.integer("links", 1), []
        for name, found in fields.mapping("parts").items():
            if not isinstance(found, list) or not found or not all(isinstance(part, dict) for part in found):
                raise fields.error("parts", f"wanted a list of objects for tensor {name}")
            parts += [(name, DeltaPart.from_record(part, f"{what}, tensor {name}")) for part in found]
        fields.finish()
        return cls.of(state, links, parts)
