"""What ranks tell each other over the network: JSON of declared types, never pickle.

Whoever can reach a port of the run could otherwise make a rank run code. A value is decoded as exactly the type that the
reader asks for, a failure only as one of the error types that the reader allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_BYTES = 1 << 28
"""Of one rank's value. The largest, what a rank writes of a version, has about 300 bytes for each tensor."""


class ExchangeError(RuntimeError):
    """What came over the network is not what was asked for, or is larger than anything that a rank sends."""


@dataclass(frozen=True)
class Failure:
    """An error on its way: the name of its type and the arguments of its constructor (numbers, texts, tuples of them)."""

    kind: str
    args: tuple[Any, ...]


def encode(value: Any) -> bytes:
    """Raises ExchangeError for what JSON of dataclasses cannot hold, and for too much of it."""
    try:
        data = msgspec.json.encode(value)
    except (TypeError, ValueError) as problem:
        raise ExchangeError(f"{type(value).__name__} cannot be sent: {problem}") from problem
    check_size(len(data))
    return data


def decode(data: bytes, kind: Any) -> Any:
    """A value of type `kind` (a dataclass, a tuple[int, ...], None, ...), each field checked. Raises ExchangeError."""
    check_size(len(data))
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as problem:
        raise ExchangeError(f"not {kind}: {problem}") from problem


def check_size(num_bytes: int) -> None:
    if not 0 <= num_bytes <= MAX_BYTES:
        raise ExchangeError(f"a rank's value has {num_bytes:,} bytes, at most {MAX_BYTES:,} are taken")


def pack_error(error: Exception) -> Failure:
    return Failure(type(error).__name__, error.args)


def unpack_error(failure: Failure, allowed: tuple[type[Exception], ...]) -> Exception:
    """The error again, when its type is one of `allowed` or made from one. Raises ExchangeError otherwise."""
    kinds = {kind.__name__: kind for base in allowed for kind in _with_subclasses(base)}
    if failure.kind not in kinds:
        raise ExchangeError(
            f"a rank failed with {failure.kind[:80]!r}, which is none of the errors that ranks may send"
        )
    try:
        return kinds[failure.kind](*(_frozen(argument) for argument in failure.args))
    except TypeError as problem:
        raise ExchangeError(f"a rank failed with {failure.kind}, but its arguments do not fit: {problem}") from problem


def _with_subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)


def _frozen(argument: Any) -> Any:
    """JSON has lists only; errors are made with tuples."""
    return tuple(_frozen(item) for item in argument) if isinstance(argument, list) else argument
