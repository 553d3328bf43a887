"""The held-out problems, answered by the instances from the published weights."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import fmean

from stages.controller.answers import Answerer
from stages.controller.client import GenerationError, InstanceDiedError, InvalidAnswerError, Sampling
from stages.controller.groups import Completion, Prompt
from stages.controller.instances import Instance

ATTEMPTS = 4
POLL_S = 0.05
SHOWN = 3


class EvaluationError(RuntimeError):
    """The held-out problems could not be answered."""


@dataclass(frozen=True)
class Evaluation:
    """Mean rewards over `problems` held-out problems: one greedy answer each, and samples at temperature 1."""

    version: int
    greedy_reward: float
    sampled_reward: float
    problems: int
    samples: int
    seconds: float


@dataclass(frozen=True)
class Evaluator:
    """`prompts_per_request` as for training; `wait_s` bounds the wait for an instance that can answer."""

    answerer: Answerer
    samples: int
    max_tokens: int
    prompts_per_request: int
    wait_s: float

    async def evaluate(self, version: int) -> Evaluation:
        """Raises EvaluationError, also when an answer comes from another version than `version`."""
        started = time.monotonic()
        self.answerer.pool.advance(version)
        with self.answerer.recorder.span("evaluate", version=version) as span:
            problems = await asyncio.to_thread(self.answerer.task.test_problems)
            prompts = [self.answerer.prompt(i, problem, self.max_tokens) for i, problem in enumerate(problems)]
            greedy = await self._answer(prompts, Sampling(1, self.max_tokens, 0.0), version, show=SHOWN)
            sampled = await self._answer(prompts, Sampling(self.samples, self.max_tokens, 1.0), version, show=0)
            span.add(greedy_reward=greedy, sampled_reward=sampled)
        return Evaluation(version, greedy, sampled, len(prompts), self.samples, time.monotonic() - started)

    async def _answer(self, prompts: list[Prompt], sampling: Sampling, version: int, *, show: int) -> float:
        """The mean reward of `sampling.n` answers to each prompt."""
        instances = max(1, len(self.answerer.pool.usable()))
        size = max(1, min(self.prompts_per_request, -(-len(prompts) // instances)))
        chunks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        answers = await asyncio.gather(*(self._ask(chunk, sampling, version) for chunk in chunks))
        rewards: list[float] = []
        for chunk, groups in zip(chunks, answers, strict=True):
            for scores in await asyncio.to_thread(self.answerer.score, chunk, groups):
                rewards.extend(scores)
        self._show(chunks[0][:show], answers[0])
        return fmean(rewards)

    async def _ask(self, prompts: list[Prompt], sampling: Sampling, version: int) -> list[list[Completion]]:
        """A repeated request gives an equally good answer, so failures are simply tried again, elsewhere if possible."""
        pool, failures = self.answerer.pool, []
        for _ in range(ATTEMPTS):
            instance = await self._claim(len(prompts) * sampling.n)
            try:
                answers = await self.answerer.ask(instance, prompts, sampling, oldest_version=version)
                self._check_version(answers, version)
            except GenerationError as error:
                failures.append(f"{instance.name}: {error}")
                interrupted = isinstance(error, InstanceDiedError) or pool.is_interrupted(instance.name)
                pool.failed(instance, interrupted=interrupted)
            else:
                return answers
            finally:
                pool.release(instance, len(prompts) * sampling.n)
        raise EvaluationError(f"{len(prompts)} held-out problems failed {ATTEMPTS} times: {'; '.join(failures)}")

    async def _claim(self, trajectories: int) -> Instance:
        deadline = time.monotonic() + self.wait_s
        while not (usable := self.answerer.pool.usable()):
            if time.monotonic() > deadline:
                raise EvaluationError(f"no instance could answer for {self.wait_s} s: {self.answerer.pool.describe()}")
            await asyncio.sleep(POLL_S)
        return self.answerer.pool.claim(usable, trajectories)

    def _check_version(self, answers: list[list[Completion]], version: int) -> None:
        newest = max(completion.versions[-1] for group in answers for completion in group)
        if newest != version:
            raise InvalidAnswerError(f"tokens of version {newest} in the evaluation of version {version}")

    def _show(self, prompts: list[Prompt], answers: list[list[Completion]]) -> None:
        for prompt, group in zip(prompts, answers, strict=False):
            text = self.answerer.tokenizer.decode([group[0].token_ids])[0]
            print(f"  {prompt.problem.prompt!r} -> {text!r} (wanted {prompt.problem.answer!r})", flush=True)
