"""Supervised steps: the policy learns to continue prompts of the training stream with their answers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from conf.schema import WarmupConfig
from stages.controller.tasks.base import Problem, Task
from stages.warmup.errors import WarmupError
from stages.warmup.vocabulary import EOS_ID, encode_strictly

IGNORED = -100  # cross_entropy's default for targets without loss
RISE_STEPS = 20
LAST_RATIO = 0.1
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
REPORT_PERIOD_S = 2.0
DISTINCT_LIMIT = 100  # draws for each example asked for, before the task counts as too small


@dataclass(frozen=True)
class Example:
    """Prompt and answer with its eos, as token ids."""

    prompt: list[int]
    answer: list[int]


Report = Callable[[int, float, float], None]
"""Called with steps done, loss of the last one, seconds since the start."""


def learning_rate(step: int, *, steps: int, peak: float) -> float:
    """Linear rise over RISE_STEPS, then a cosine down to LAST_RATIO of the peak at the last step."""
    rise = min(RISE_STEPS, max(1, steps // 2))
    if step < rise:
        return peak * (step + 1) / rise
    share = (step - rise) / max(1, steps - rise)
    return peak * (LAST_RATIO + (1 - LAST_RATIO) * 0.5 * (1 + math.cos(math.pi * share)))


def example_batches(task: Task, tokenizer: Tokenizer, options: WarmupConfig) -> Iterator[list[Example]]:
    """Endless batches: from a fixed set of `options.examples` different problems, or new problems for ever.

    Only the training stream is used. Raises WarmupError for text without tokens or a task with too few problems.
    """
    if options.examples:
        rng = random.Random(options.seed)
        labelled = [_encode(problem, tokenizer) for problem in _distinct(task, options.examples)]
        while True:
            yield rng.choices(labelled, k=options.batch_size)
    index = 0
    while True:
        yield [_encode(task.train_problem(index + i), tokenizer) for i in range(options.batch_size)]
        index += options.batch_size


def train(policy: Any, batches: Iterator[list[Example]], options: WarmupConfig, report: Report) -> None:
    """`options.steps` AdamW steps on the mean token loss of the answers."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    started = reported = time.monotonic()
    policy.train()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=options.steps, peak=options.learning_rate)
        loss = supervised_step(policy, optimizer, next(batches))
        now = time.monotonic()
        if now - reported >= REPORT_PERIOD_S or step + 1 == options.steps:
            reported = now
            report(step + 1, loss, now - started)
    policy.eval()


def supervised_step(policy: Any, optimizer: torch.optim.Optimizer, examples: list[Example]) -> float:
    """One step; returns its loss (nats per answer token)."""
    ids, targets = collate(examples)
    logits = policy(input_ids=ids, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return float(loss.detach())


def collate(examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 [examples, longest - 1]; padding is on the right, where a causal model never looks."""
    longest = max(len(example.prompt) + len(example.answer) for example in examples)
    ids = torch.zeros(len(examples), longest - 1, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORED)
    for row, example in enumerate(examples):
        sequence = torch.tensor(example.prompt + example.answer)
        ids[row, : len(sequence) - 1] = sequence[:-1]
        targets[row, len(example.prompt) - 1 : len(sequence) - 1] = torch.tensor(example.answer)
    return ids, targets


def _encode(problem: Problem, tokenizer: Tokenizer) -> Example:
    if not problem.answer:
        raise WarmupError(f"the task gives no answer to {problem.prompt!r}: it can not be learned by supervised steps")
    answer = encode_strictly(tokenizer, problem.answer, special=False)
    return Example(encode_strictly(tokenizer, problem.prompt, special=True), [*answer, EOS_ID])


def _distinct(task: Task, count: int) -> list[Problem]:
    found: dict[str, Problem] = {}
    for index in range(count * DISTINCT_LIMIT):
        problem = task.train_problem(index)
        found.setdefault(problem.prompt, problem)
        if len(found) == count:
            return list(found.values())
    raise WarmupError(
        f"the task has only {len(found)} different problems in {count * DISTINCT_LIMIT}; lower warmup.examples"
    )
