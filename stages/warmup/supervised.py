"""Supervised steps: the policy learns to continue prompts of the training stream with their answers."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from conf.sections import WarmupConfig
from stages.controller.tasks.base import Problem, Task
from stages.warmup.errors import WarmupError
from stages.warmup.vocabulary import EOS_ID, encode_strictly

IGNORED = -100  # cross_entropy's default for targets without loss
RISE_STEPS = 20
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
REPORT_PERIOD_S = 2.0
DISTINCT_LIMIT = 20  # draws for each problem asked for, before the task counts as too small
PROBLEMS_APART = 200
FIRST_LOOK_STEP = 30
LOOK_STEPS = 3


@dataclass(frozen=True)
class Example:
    """Prompt and answer with its eos, as token ids."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Progress:
    """`reward` is the last one measured on the problems kept apart; None before the first."""

    step: int
    loss: float
    seconds: float
    reward: float | None


def labelled_data(
    task: Task, tokenizer: Tokenizer, options: WarmupConfig
) -> tuple[Iterator[list[Example]], list[Problem]]:
    """Endless batches to learn from, and different problems of the training stream that are never in them.

    Batches come from a fixed set of `options.examples` different problems, or are new problems for ever. Problems are
    kept apart only where `options.target_reward` asks for them; test problems are in neither. Raises WarmupError for
    text without tokens or a task with too few problems.
    """
    num_apart = PROBLEMS_APART if options.target_reward else 0
    problems = _distinct(task, num_apart + options.examples)
    apart, labelled = problems[:num_apart], problems[num_apart:]
    if options.examples:
        return _from_set([_encode(problem, tokenizer) for problem in labelled], options), apart
    return _from_stream(task, tokenizer, options, {problem.prompt for problem in apart}), apart


def make_optimizer(policy: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY)


def train(
    policy: Any,
    batches: Iterator[list[Example]],
    options: WarmupConfig,
    reward: Callable[[], float],
    report: Callable[[Progress], None],
) -> None:
    """AdamW steps on the mean token loss of the answers: a linear rise of the learning rate, then constant.

    Ends after `options.steps`, or when `reward()` (looked at every LOOK_STEPS) reaches `options.target_reward`. Where
    a policy begins to get things right differs much between seeds; the target makes starters of one quality.
    """
    optimizer = make_optimizer(policy)
    started = reported = time.monotonic()
    measured: float | None = None
    for step in range(1, options.steps + 1):
        policy.train()
        rate = options.learning_rate * min(1.0, step / RISE_STEPS)
        loss = supervised_step(policy, optimizer, next(batches), rate)
        policy.eval()
        if options.target_reward and step >= FIRST_LOOK_STEP and step % LOOK_STEPS == 0:
            measured = reward()
        done = step == options.steps or (measured is not None and measured >= options.target_reward)
        now = time.monotonic()
        if done or now - reported >= REPORT_PERIOD_S:
            reported = now
            report(Progress(step, loss, now - started, measured))
        if done:
            return


def supervised_step(
    policy: Any, optimizer: torch.optim.Optimizer, examples: list[Example], learning_rate: float
) -> float:
    """One step; returns its loss (nats per answer token)."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
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


def _from_set(labelled: list[Example], options: WarmupConfig) -> Iterator[list[Example]]:
    rng = random.Random(options.seed)
    while True:
        yield rng.choices(labelled, k=options.batch_size)


def _from_stream(
    task: Task, tokenizer: Tokenizer, options: WarmupConfig, excluded: set[str]
) -> Iterator[list[Example]]:
    stream = (problem for index in itertools.count() if (problem := task.train_problem(index)).prompt not in excluded)
    while True:
        yield [_encode(problem, tokenizer) for problem in itertools.islice(stream, options.batch_size)]


def _encode(problem: Problem, tokenizer: Tokenizer) -> Example:
    if not problem.answer:
        raise WarmupError(f"the task gives no answer to {problem.prompt!r}: it can not be learned by supervised steps")
    answer = encode_strictly(tokenizer, problem.answer, special=False)
    return Example(encode_strictly(tokenizer, problem.prompt, special=True), [*answer, EOS_ID])


def _distinct(task: Task, count: int) -> list[Problem]:
    found: dict[str, Problem] = {}
    for index in range(count * DISTINCT_LIMIT):
        if len(found) == count:
            break
        problem = task.train_problem(index)
        found.setdefault(problem.prompt, problem)
    if len(found) < count:
        raise WarmupError(
            f"the task gave only {len(found)} different problems in {count * DISTINCT_LIMIT} draws, wanted {count} "
            f"(warmup.examples, and {PROBLEMS_APART} for warmup.target_reward); lower warmup.examples"
        )
    return list(found.values())
