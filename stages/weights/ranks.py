"""The trainer ranks that publish together, without naming the library that connects them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from stages.weights.errors import PublishError, WeightsError

Value = TypeVar("Value")


class RankGroup(Protocol):
    """`gather_objects` is an all-gather: every rank gives one value and gets all of them, in rank order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_objects(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class SingleRank:
    """A trainer of one rank."""

    rank: int = 0
    size: int = 1

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


def publish_error(described: str) -> PublishError:
    return PublishError(f"publishing failed on {described}")


def agree(
    ranks: RankGroup,
    action: Callable[[], Value],
    travels: type[Exception] | tuple[type[Exception], ...] = WeightsError,
    wrap: Callable[[str], Exception] = publish_error,
) -> list[Value]:
    """Run `action` on every rank and give every rank all results.

    When it fails anywhere it fails everywhere, with the error of the lowest failing rank, so that no rank is left
    waiting. An error of type `travels` goes as it is, so it must survive pickling; any other OSError, RuntimeError or
    ValueError as what `wrap` makes of "trainer rank 1 of 4: ..."; anything else is a fault of this program and ends the
    rank, and with it the trainer.
    """
    value: Value | None = None
    error: Exception | None = None
    cause: Exception | None = None
    try:
        value = action()
    except (OSError, RuntimeError, ValueError) as problem:
        cause = problem
        error = problem if isinstance(problem, travels) else wrap(_described(ranks, problem))
    outcomes = ranks.gather_objects((value, error))
    for _, failure in outcomes:
        if failure is not None:
            raise failure from (None if cause is failure else cause)
    return [result for result, _ in outcomes]


def _described(ranks: RankGroup, problem: Exception) -> str:
    return f"trainer rank {ranks.rank} of {ranks.size}: {type(problem).__name__}: {problem}"
