"""A plan that cannot be made."""

from __future__ import annotations

from collections.abc import Callable


class PlanError(ValueError):
    """No layout fits. Each of `problems` names wanted, available and the option to change."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; also ".join(problems))
        self.problems = problems


def problems_of(*checks: Callable[[], object]) -> list[str]:
    """What these checks, which raise PlanError, find wrong; said once where several find the same."""
    found: list[str] = []
    for check in checks:
        try:
            check()
        except PlanError as error:
            found += error.problems
    return list(dict.fromkeys(found))
