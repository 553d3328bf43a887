"""When a version is published as a delta, and which deltas lead to it from what somebody has. Pure; see `stages.weights.delta`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stages.weights.errors import WeightsError

MOST_LINKS = 16
"""So many deltas follow each other at most: a late joiner reads a full version and all of them."""
MOST_SHARE = 0.5
"""A delta that has more of the full version's bytes is not worth what it takes to read: the version is published in full."""


class BrokenChainError(WeightsError):
    """No row of published versions leads to the wanted one."""

    def __init__(self, version: int, problem: str) -> None:
        super().__init__(version, problem)

    def __str__(self) -> str:
        return f"version {self.args[0]} cannot be reached: {self.args[1]}"


@dataclass(frozen=True)
class State:
    """A version and the digest of its manifest: two attempts may have published different things under one number."""

    version: int
    digest: str


@dataclass(frozen=True)
class Link:
    """What is published of a version: in full (`base` is None), or as a delta of `base`. `bytes` are those to be read."""

    state: State
    base: State | None
    bytes: int


def is_worth_it(delta_bytes: int, full_bytes: int, links_before: int) -> bool:
    """Publish as a delta? `links_before`: how many deltas in a row lead to its base from a full version."""
    return links_before < MOST_LINKS and delta_bytes <= MOST_SHARE * full_bytes


def links_to(target: State, published: Mapping[int, Link]) -> int:
    """How many deltas lead to `target` from the nearest full version; 0 when it is full. Raises BrokenChainError."""
    return len(_back(target, published, held=None)) - 1


def route(target: State, held: State | None, published: Mapping[int, Link]) -> tuple[Link, ...]:
    """What to read, in order, to get from `held` (None: nothing) to `target`: deltas on `held`, or a full version and deltas.

    The way with fewer bytes. Empty when `held` is the target. Raises BrokenChainError when a version on the way is missing or has
    another digest than the delta on it names: a delta is never put on another base.
    """
    if held == target:
        return ()
    ways = []
    problem: BrokenChainError | None = None
    for start in dict.fromkeys((held, None)):
        try:
            ways.append(_back(target, published, start))
        except BrokenChainError as broken:
            problem = broken
    if not ways:
        assert problem is not None
        raise problem
    return min(ways, key=lambda way: sum(link.bytes for link in way))


def _back(target: State, published: Mapping[int, Link], held: State | None) -> tuple[Link, ...]:
    """From `target` back to `held`, or to the nearest full version, whichever comes first; in the order of reading."""
    way: list[Link] = []
    wanted = target
    while wanted != held:
        link = published.get(wanted.version)
        if link is None:
            raise BrokenChainError(
                target.version, f"version {wanted.version}, a base of it, is not published (any more)"
            )
        if link.state != wanted:
            raise BrokenChainError(
                target.version, f"version {wanted.version} has digest {link.state.digest}, wanted {wanted.digest}"
            )
        way.append(link)
        if link.base is None:
            break
        if link.base.version >= wanted.version:
            raise BrokenChainError(
                target.version, f"version {wanted.version} names {link.base.version} as its base, which is not older"
            )
        wanted = link.base
    return tuple(reversed(way))
