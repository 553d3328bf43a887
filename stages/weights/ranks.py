"""The trainer ranks that publish together, without naming the library that connects them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from stages.exchange import ExchangeError, Failure, decode, encode, pack_error, unpack_error
from stages.weights.errors import PublishError, WeightsError

Value = TypeVar("Value")

_DONE, _FAILED = b"+", b"-"
"""The first byte of what a rank gives in `agree`; its value or its failure follows."""


class RankGroup(Protocol):
    """`gather` is an all-gather: every rank gives some bytes and gets those of all, in rank order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, data: bytes) -> list[bytes]: ...


@dataclass(frozen=True)
class SingleRank:
    """A trainer of one rank."""

    rank: int = 0
    size: int = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


def publish_error(described: str) -> PublishError:
    return PublishError(f"publishing failed on {described}")


def first_rank_says(ranks: RankGroup, value: Value, kind: Any) -> Value:
    """Rank 0's value, of type `kind`, on every rank."""
    said: Value = decode(ranks.gather(encode(value if ranks.rank == 0 else None))[0], kind)
    return said


def agree(
    ranks: RankGroup,
    action: Callable[[], Value],
    kind: Any,
    travels: type[Exception] | tuple[type[Exception], ...] = WeightsError,
    wrap: Callable[[str], Exception] = publish_error,
) -> list[Value]:
    """Run `action` on every rank and give every rank all results, each of type `kind` (see `stages.exchange.decode`).

    When it fails anywhere it fails everywhere, with the error of the lowest failing rank, so that no rank is left
    waiting. An error of type `travels` goes as it is; any other OSError, RuntimeError or ValueError as what `wrap` makes
    of "trainer rank 1 of 4: ..."; anything else is a fault of this program and ends the rank, and with it the trainer.
    """
    error: Exception | None = None
    cause: Exception | None = None
    try:
        sent = _DONE + encode(action())
    except (OSError, RuntimeError, ValueError) as problem:
        plain = wrap(f"trainer rank {ranks.rank} of {ranks.size}: {type(problem).__name__}: {problem}")
        error, cause = (problem, None) if isinstance(problem, travels) else (plain, problem)
        sent = _FAILED + _encoded_error(error, plain)
    gathered = ranks.gather(sent)
    for rank, data in enumerate(gathered):
        if rank == ranks.rank and error is not None:
            raise error from cause
        if data[:1] == _FAILED:
            allowed = (*(travels if isinstance(travels, tuple) else (travels,)), type(wrap("")))
            raise unpack_error(decode(data[1:], Failure), allowed) from (cause or error)
    return [decode(data[1:], kind) for data in gathered]


def _encoded_error(error: Exception, plain: Exception) -> bytes:
    """`plain` in its place when its arguments are not what can be sent."""
    try:
        return encode(pack_error(error))
    except ExchangeError:
        return encode(pack_error(plain))
