"""Answers of a policy that is held in this process, and what they are worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer

from stages.controller.tasks.base import Problem, Task
from stages.warmup.vocabulary import EOS_ID


def mean_reward(
    policy: Any,
    tokenizer: Tokenizer,
    task: Task,
    problems: Sequence[Problem],
    *,
    max_tokens: int,
    samples: int = 1,
    greedy: bool = True,
) -> float:
    """The mean reward of `samples` answers to each problem, by the task's verifier.

    Prompts of one length share a batch, so no padding is needed.
    """
    by_length: dict[int, list[tuple[list[int], Problem]]] = defaultdict(list)
    for problem in problems:
        ids = tokenizer.encode(problem.prompt).ids
        by_length[len(ids)].extend([(ids, problem)] * samples)
    rewards: list[float] = []
    for rows in by_length.values():
        answers = generate(policy, torch.tensor([ids for ids, _ in rows]), max_tokens=max_tokens, greedy=greedy)
        for answer, (_, problem) in zip(answers, rows, strict=True):
            cut_off = task.zero_if_truncated and EOS_ID not in answer
            rewards.append(0.0 if cut_off else task.score(tokenizer.decode(answer), problem))
    return fmean(rewards)


@torch.no_grad()
def generate(policy: Any, prompts: torch.Tensor, *, max_tokens: int, greedy: bool) -> list[list[int]]:
    """Answers to prompts int64 [batch, length], with their eos if they ended; greedy or sampled at temperature 1."""
    tokens, cache, columns = prompts, None, []
    for _ in range(max_tokens):
        output = policy(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[:, -1]
        tokens = logits.argmax(-1, keepdim=True) if greedy else torch.multinomial(logits.softmax(-1), 1)
        columns.append(tokens)
    rows: list[list[int]] = torch.cat(columns, dim=1).tolist()
    return [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in rows]
