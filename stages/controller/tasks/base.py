"""What a task is: where prompts come from and what an answer is worth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


class TaskError(ValueError):
    """The task is not known, or its parameters can not make one."""


@dataclass(frozen=True)
class Problem:
    """`prompt` is the text the policy gets, `answer` a correct completion (for the warm-up; empty when there is none).

    `data` is whatever the task's verifier needs; nobody else looks into it.
    """

    prompt: str
    answer: str
    data: dict[str, Any] = field(default_factory=dict, repr=False)


class Task(ABC):
    """Prompts and rewards. A subclass takes its own parameters from `task.params` as keyword arguments.

    Rules: `train_problem(i)` depends only on the parameters, `seed` and `i`, for any i >= 0, so that a resumed run asks
    the same questions; no test problem is ever a training problem; test problems do not depend on `seed`, so that runs
    compare. `score` is called from a worker thread.
    """

    #: Prompts are user messages, put through the tokenizer's chat template.
    chat: bool = False
    #: An answer that max_new_tokens cut off gets 0 without being looked at.
    zero_if_truncated: bool = True

    def __init__(self, *, seed: int, test_size: int) -> None:
        self.seed = seed
        self.test_size = test_size

    @abstractmethod
    def train_problem(self, index: int) -> Problem:
        """Problem `index` of the endless training stream."""

    @abstractmethod
    def test_problems(self) -> list[Problem]:
        """The `test_size` held-out problems, all different."""

    @abstractmethod
    def score(self, completion: str, problem: Problem) -> float:
        """The reward of an answer, by the task's own verifier."""
