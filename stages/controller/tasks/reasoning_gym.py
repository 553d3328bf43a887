"""Any dataset of reasoning-gym, with the library's own verifier as the reward."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from functools import lru_cache
from typing import Any

from stages.controller.tasks.base import Problem, Task, TaskError

PAGE = 1024  # problems that one dataset object is asked for; some generators depend on their size
MAX_REDRAWS = 64


class ReasoningGymTask(Task):
    """Problems are drawn from generators with hashed seeds, so any index is reached without those before it.

    Which side of the split a problem is on depends on a hash of its prompt text alone: `test_share` of all prompt texts
    belong to the test side, the training stream draws again when it hits one. So a test question can not be trained
    on, whatever the generator repeats.

    Args:
        dataset: name of the reasoning-gym dataset, e.g. "chain_sum".
        options: fields of its configuration class (not seed and size).
        template: the prompt; `{question}` is replaced.
        lower: prompts, answers and completions are in lower case (for a small alphabet).
        answer_tag: take the last <tag>...</tag> of a completion as the answer; empty takes all of it, stripped.
        test_share: share of prompt texts on the test side.
        whole_only: an answer that the verifier does not call wholly right (score 1) is worth 0. Partial credit can hold a
            policy on answers that are almost right.
        chat: put prompts through the tokenizer's chat template.
    """

    def __init__(
        self,
        *,
        seed: int,
        test_size: int,
        dataset: str,
        options: dict[str, Any] | None = None,
        template: str = "{question}",
        lower: bool = False,
        answer_tag: str = "",
        test_share: float = 0.1,
        whole_only: bool = False,
        chat: bool = False,
    ) -> None:
        super().__init__(seed=seed, test_size=test_size)
        if not 0.0 < test_share < 1.0:
            raise TaskError(f"task.params.test_share is {test_share}, wanted more than 0 and less than 1")
        if "{question}" not in template:
            raise TaskError("task.params.template must contain {question}")
        self.dataset = dataset
        self.options = dict(options or {})
        self.template = template
        self.lower = lower
        self.answer_tag = answer_tag
        self.test_share = test_share
        self.whole_only = whole_only
        self.chat = chat
        _check_options(dataset, self.options)
        self._page = lru_cache(maxsize=8)(self._make_page)
        self._verifier = self._make_page("verifier", 0, 0)

    def train_problem(self, index: int) -> Problem:
        page, position = divmod(index, PAGE)
        for redraw in range(MAX_REDRAWS):
            problem = self._problem(self._page(f"train {self.seed}", page, redraw)[position])
            if not self._is_test(problem.prompt):
                return problem
        raise TaskError(
            f"{MAX_REDRAWS} draws from reasoning-gym {self.dataset} were all test problems; "
            f"lower task.params.test_share (now {self.test_share})"
        )

    def test_problems(self) -> list[Problem]:
        found: dict[str, Problem] = {}
        draws = int(20 * self.test_size / self.test_share)
        for draw in range(draws):
            page, position = divmod(draw, PAGE)
            problem = self._problem(self._page("test", page, 0)[position])
            if self._is_test(problem.prompt):
                found.setdefault(problem.prompt, problem)
            if len(found) == self.test_size:
                return list(found.values())
        raise TaskError(
            f"reasoning-gym {self.dataset} gave only {len(found)} different test problems in {draws} draws, wanted "
            f"task.test_size={self.test_size}; lower it, or raise task.params.test_share (now {self.test_share})"
        )

    def score(self, completion: str, problem: Problem) -> float:
        answer = self._extract(completion)
        score = 0.0 if answer is None else float(self._verifier.score_answer(answer, problem.data))
        return 0.0 if self.whole_only and score < 1.0 else score

    def _problem(self, entry: dict[str, Any]) -> Problem:
        prompt = self.template.replace("{question}", entry["question"])
        answer = str(entry["answer"])
        if self.answer_tag:
            answer = f"<{self.answer_tag}>{answer}</{self.answer_tag}>"
        if self.lower:
            prompt, answer = prompt.lower(), answer.lower()
        return Problem(prompt, answer, entry)

    def _extract(self, completion: str) -> str | None:
        if not self.answer_tag:
            return completion.strip()
        from reasoning_gym.utils import extract_answer

        answer: str | None = extract_answer(completion, tag_name=self.answer_tag)
        return answer

    def _is_test(self, prompt: str) -> bool:
        return _hash(prompt, bits=32) < self.test_share * 2**32

    def _make_page(self, stream: str, page: int, redraw: int) -> Any:
        import reasoning_gym

        # 31 bits: some generators seed numpy.
        seed = _hash(f"{stream}/{page}/{redraw}", bits=31)
        return reasoning_gym.create_dataset(self.dataset, **self.options, seed=seed, size=PAGE)


def _hash(text: str, *, bits: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - bits)


def _check_options(dataset: str, options: dict[str, Any]) -> None:
    """Raise TaskError for an unknown dataset, unknown options, or values that its own validation refuses."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, list(DATASETS), n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise TaskError(
            f"task.params.dataset {dataset!r} is not in reasoning-gym{hint}; it has {len(DATASETS)} datasets"
        )
    fields = [field.name for field in dataclasses.fields(DATASETS[dataset][1]) if field.name not in ("seed", "size")]
    for name in options:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise TaskError(
                f"task.params.options.{name} is not an option of {dataset}{hint}; it takes {', '.join(fields)}"
            )
    try:
        reasoning_gym.create_dataset(dataset, **options, seed=0, size=1)
    except AssertionError as error:
        raise TaskError(f"reasoning-gym {dataset} refuses task.params.options: {error}") from error
