"""From a problem to scored answers: encode, ask one instance, decode, verify."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stages.controller.client import (
    CompletionClient,
    InstanceDiedError,
    InstanceUnreachableError,
    InvalidAnswerError,
    Sampling,
    ServerFailedError,
)
from stages.controller.groups import Completion, Prompt
from stages.controller.instances import Instance, InstancePool
from stages.controller.tasks.base import Problem, Task
from stages.controller.tokenizer import PolicyTokenizer
from traces.recorder import Recorder


class RewardError(RuntimeError):
    """The task's verifier gave something that is no reward."""


@dataclass
class Answerer:
    """What the dispatcher and the evaluation share."""

    client: CompletionClient
    pool: InstancePool
    tokenizer: PolicyTokenizer
    task: Task
    recorder: Recorder
    max_model_len: int

    def prompt(self, index: int, problem: Problem, max_tokens: int) -> Prompt:
        """Raises ValueError when the prompt leaves no room for an answer of `max_tokens` tokens."""
        encode = self.tokenizer.encode_chat if self.task.chat else self.tokenizer.encode
        token_ids = encode(problem.prompt)
        if len(token_ids) + max_tokens > self.max_model_len:
            raise ValueError(
                f"prompt {index} has {len(token_ids)} tokens; with max_new_tokens {max_tokens} that is more than "
                f"max_model_len {self.max_model_len}: raise max_model_len or lower max_new_tokens"
            )
        return Prompt(index, problem, token_ids)

    async def ask(
        self, instance: Instance, prompts: list[Prompt], sampling: Sampling, *, oldest_version: int
    ) -> list[list[Completion]]:
        """The answers of `instance`, one list for each prompt.

        Raises the errors of CompletionClient.complete, InstanceDiedError when the instance failed with the request, and
        InvalidAnswerError when a token comes from a version older than `oldest_version`, which this instance has proved to
        hold.
        """
        try:
            answers = await self.client.complete(instance.base_url, [prompt.token_ids for prompt in prompts], sampling)
        except (InstanceUnreachableError, ServerFailedError) as error:
            if await self.pool.has_died(instance):
                raise InstanceDiedError(f"{instance.name} ended: {error}") from error
            raise
        oldest = min(completion.versions[0] for group in answers for completion in group)
        if oldest < oldest_version:
            raise InvalidAnswerError(
                f"{instance.name} answered with weights of version {oldest}, although it proved version {oldest_version}"
            )
        self.pool.succeeded(instance)
        return answers

    def score(self, prompts: list[Prompt], answers: list[list[Completion]]) -> list[list[float]]:
        """The reward of each answer. Raises RewardError; an exception of the task itself gets the problem as a note."""
        texts = iter(self.tokenizer.decode([answer.token_ids for group in answers for answer in group]))
        return [
            [self._score_one(prompt, answer, next(texts)) for answer in group]
            for prompt, group in zip(prompts, answers, strict=True)
        ]

    def _score_one(self, prompt: Prompt, answer: Completion, text: str) -> float:
        if self.task.zero_if_truncated and not answer.finished:
            return 0.0
        try:
            reward = self.task.score(text, prompt.problem)
        except Exception as error:
            error.add_note(f"while scoring {text!r} as an answer to {prompt.problem.prompt!r}")
            raise
        if not math.isfinite(reward):
            raise RewardError(f"reward {reward} of {text!r} as an answer to {prompt.problem.prompt!r}")
        return reward
