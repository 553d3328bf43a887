"""Branches that the planner cut, collected so that thousands of them stay readable and none is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.errors import PlanError
from planner.plan import Rejected


@dataclass
class Rejections:
    """Cuts of one kind are one entry: the same branch, and reasons that differ only in their numbers.

    An entry keeps the reason of the first cut that was added.
    """

    _found: dict[tuple[str, str], tuple[str, list[int]]] = field(default_factory=dict)

    def branch(self, branch: str, reason: PlanError | str) -> None:
        """A whole branch, such as a tensor-parallel size."""
        self._found[branch, str(reason)] = (_wanted_and_available(reason), [])

    def size(self, branch: str, train_gpus: int, reason: PlanError | str) -> None:
        """One size of the training side; `branch` is "" when it holds for every tensor-parallel size."""
        key = (branch, re.sub(r"\d+(\.\d+)?", "#", str(reason)))
        self._found.setdefault(key, (_wanted_and_available(reason), []))[1].append(train_gpus)

    def entries(self) -> tuple[Rejected, ...]:
        return tuple(
            Rejected(", ".join(part for part in (branch, _sizes(sizes)) if part), reason)
            for (branch, _), (reason, sizes) in self._found.items()
        )


def _wanted_and_available(reason: PlanError | str) -> str:
    """Without the option to change: in a search nobody asked for this size."""
    return str(reason).split(";")[0]


def _sizes(sizes: list[int]) -> str:
    return f"train_gpus={runs(sorted(sizes))}" if sizes else ""


def runs(numbers: Sequence[int]) -> str:
    """Ascending numbers, three or more at equal distance as a range: 1..7, 9..15 or 8..64 by 8."""
    parts, start = [], 0
    while start < len(numbers):
        end = start + 1
        step = numbers[end] - numbers[start] if end < len(numbers) else 0
        while end + 1 < len(numbers) and numbers[end + 1] - numbers[end] == step:
            end += 1
        if end + 1 - start < 3:
            parts.append(str(numbers[start]))
            start += 1
            continue
        parts.append(f"{numbers[start]}..{numbers[end]}" + ("" if step == 1 else f" by {step}"))
        start = end + 1
    return ", ".join(parts)
