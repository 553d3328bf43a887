"""The controller without a trainer: generate and score from whatever the instances serve now."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, replace
from statistics import fmean, pstdev
from typing import Any

from stages.context import StageContext
from stages.controller.dispatcher import Dispatcher
from stages.controller.groups import FinishedGroup
from stages.controller.ledger import Ledger
from stages.controller.loop import POLL_S
from stages.controller.stage import (
    make_answerer,
    make_client,
    make_evaluator,
    make_limits,
    training_sampling,
    until_stopped,
)
from stages.controller.staleness import Bounds
from stages.weights.instances import read_status


def generate_only(context: StageContext, steps: int) -> list[dict[str, Any]]:
    """Generate and score `steps` batches' worth of groups; prints and returns one line for each. Writes no batch.

    tokens_per_s is the mean since the first request: batches overlap.
    """
    return asyncio.run(until_stopped(context, _generate(context, steps)))


def evaluate_only(context: StageContext) -> dict[str, Any]:
    """Answer the held-out problems; prints and returns the result."""
    return asyncio.run(until_stopped(context, _evaluate(context)))


async def _generate(context: StageContext, steps: int) -> list[dict[str, Any]]:
    config = replace(context.config, total_steps=steps)
    # Versions stand still, so staleness can not bound anything here.
    bounds = replace(Bounds.of(config), max_head_offpolicyness=steps)
    lines: list[dict[str, Any]] = []
    async with make_client(context) as client:
        answerer = await asyncio.to_thread(make_answerer, context, client)
        dispatcher = Dispatcher(answerer, Ledger(None), bounds, training_sampling(config), make_limits(config))
        started_s = time.monotonic()
        try:
            while len(lines) < steps:
                dispatcher.fill(0)
                groups = dispatcher.take(len(lines))
                if groups is None:
                    await dispatcher.wait(POLL_S)
                    continue
                lines.append(_line(groups, len(lines)))
                tokens = sum(line["response_tokens"] for line in lines)
                lines[-1]["tokens_per_s"] = tokens / (time.monotonic() - started_s)
                print(json.dumps(lines[-1]), flush=True)
        finally:
            await dispatcher.close()
    return lines


async def _evaluate(context: StageContext) -> dict[str, Any]:
    async with make_client(context) as client:
        answerer = await asyncio.to_thread(make_answerer, context, client)
        evaluation = asdict(await make_evaluator(context.config, answerer).evaluate(_served_version(context)))
    print(json.dumps(evaluation), flush=True)
    return evaluation


def _served_version(context: StageContext) -> int:
    """The version in the registrations. Raises ValueError when instances differ or there is none."""
    run = context.run
    found = [read_status(run, placement.name) for placement in context.plan.rollout.instances]
    versions = {-1 if status is None else status.version for status in found}
    if len(versions) != 1 or -1 in versions:
        raise ValueError(
            f"instances serve versions {sorted(versions)}; start them with `python -m stages.rollout {run.root}`"
        )
    return versions.pop()


def _line(groups: list[FinishedGroup], step: int) -> dict[str, Any]:
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "step": step,
        "reward": fmean(rewards),
        "reward_std": pstdev(rewards),
        "response_tokens": sum(group.response_tokens for group in groups),
        "oldest_version": min(group.oldest_version for group in groups),
    }
