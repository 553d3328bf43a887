"""The controller's run: evaluate, train, evaluate, sum up, end the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from conf.schema import LibraConfig
from stages.context import StageContext
from stages.controller.answers import Answerer
from stages.controller.client import CompletionClient, Sampling
from stages.controller.dispatcher import Dispatcher, Limits
from stages.controller.evaluation import Evaluation, Evaluator
from stages.controller.instances import InstancePool
from stages.controller.ledger import Ledger
from stages.controller.loop import TrainingLoop
from stages.controller.metrics import MetricsFile
from stages.controller.progress import Progress
from stages.controller.staleness import Bounds
from stages.controller.summary import Summary
from stages.controller.tasks import make_task
from stages.controller.tokenizer import PolicyTokenizer
from stages.desired import end_run
from stages.files import WaitTimeoutError, wait_for

Result = TypeVar("Result")
STOP_POLL_S = 0.05


def run(context: StageContext) -> dict[str, Any]:
    """One whole run; returns the summary. Raises StoppedError when asked to stop, and named errors of its parts."""
    bounds = Bounds.of(context.config)
    summary = Summary.of(context.run)
    progress = make_progress(context)
    wait_for_first_weights(context, progress)
    return asyncio.run(until_stopped(context, _run(context, bounds, progress, summary)))


async def _run(context: StageContext, bounds: Bounds, progress: Progress, summary: Summary) -> dict[str, Any]:
    config, run_dir = context.config, context.run
    with MetricsFile(run_dir.metrics_jsonl) as metrics, Ledger(ledger_path(context)) as ledger:
        async with make_client(context) as client:
            answerer = await asyncio.to_thread(make_answerer, context, client)
            evaluator = make_evaluator(config, answerer)
            summary.before = await _evaluate(context, evaluator, metrics, version=progress.served_version)
            summary.started_steps = time.time()
            dispatcher = Dispatcher(answerer, ledger, bounds, training_sampling(config), make_limits(config))
            loop = TrainingLoop(context, dispatcher, progress, metrics)
            try:
                await loop.run()
            finally:
                await dispatcher.close()
            summary.manifests, summary.ended_steps = loop.manifests, time.time()
            summary.after = await _evaluate(context, evaluator, metrics, version=config.total_steps)
        payload = summary.write(progress, ledger.state)
    end_run(run_dir, "success", f"{config.total_steps} steps trained")
    return payload


async def _evaluate(
    context: StageContext, evaluator: Evaluator, metrics: MetricsFile, *, version: int
) -> Evaluation | None:
    if not context.config.launch.evaluate:
        return None
    evaluation = await evaluator.evaluate(version)
    metrics.write({"event": "evaluation", **asdict(evaluation)})
    print(
        f"version {version}: greedy {evaluation.greedy_reward:.3f}, sampled {evaluation.sampled_reward:.3f} "
        f"on {evaluation.problems} held-out problems ({evaluation.seconds:.1f} s)",
        flush=True,
    )
    return evaluation


async def until_stopped(context: StageContext, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; cancels it and raises StoppedError as soon as the stage is asked to stop."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            context.check_stop()
            await asyncio.wait([task], timeout=STOP_POLL_S)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def wait_for_first_weights(context: StageContext, progress: Progress) -> None:
    """Wait until every instance has proved version 0. Raises WaitTimeoutError, StoppedError."""
    config = context.config
    deadline_s = config.rollout.ready_timeout_s + config.weights.refresh_timeout_s
    pool = make_pool(context)
    with context.recorder.span("wait_for_instances"):

        def look() -> bool | None:
            progress.look(0)
            return True if progress.served_version >= 0 else None

        try:
            wait_for(
                look,
                deadline_s=deadline_s,
                awaited=f"{context.run.refreshed_json(0)} (every instance serving version 0)",
                from_whom="the trainer",
                check=context.check_stop,
            )
        except WaitTimeoutError as error:
            error.add_note(f"instances: {pool.describe()}")
            raise


def make_progress(context: StageContext) -> Progress:
    config = context.config
    return Progress(context.run, config.total_steps, config.sync_interval, config.algorithm.step_timeout_s)


def make_pool(context: StageContext) -> InstancePool:
    config = context.config
    return InstancePool(
        context.run,
        context.plan.rollout.instances,
        heartbeat_timeout_s=config.rollout.heartbeat_timeout_s,
        reload_keeps_requests=config.rollout_weight_reload_method == "inplace",
    )


def make_client(context: StageContext) -> CompletionClient:
    return CompletionClient(
        context.run.token_file.read_text(encoding="utf-8").strip(), context.config.rollout.request_timeout_s
    )


def make_answerer(context: StageContext, client: CompletionClient) -> Answerer:
    """Raises TaskError, TokenizerError."""
    config = context.config
    return Answerer(
        client=client,
        pool=make_pool(context),
        tokenizer=PolicyTokenizer(Path(config.tokenizer_path or config.model_path)),
        task=make_task(config.task, seed=config.seed),
        recorder=context.recorder,
        max_model_len=config.max_model_len,
    )


def make_evaluator(config: LibraConfig, answerer: Answerer) -> Evaluator:
    return Evaluator(
        answerer,
        samples=config.task.test_samples,
        max_tokens=config.max_new_tokens,
        prompts_per_request=prompts_per_request(config, config.task.test_samples),
        wait_s=config.rollout.ready_timeout_s,
    )


def make_limits(config: LibraConfig) -> Limits:
    return Limits(
        prompts_per_request=prompts_per_request(config, config.n_samples),
        max_retries=config.rollout.max_retries,
        drop_uniform_groups=config.algorithm.drop_uniform_groups,
    )


def prompts_per_request(config: LibraConfig, n_samples: int) -> int:
    """See option rollout.request_tokens."""
    return max(1, config.rollout.request_tokens // (n_samples * config.max_new_tokens))


def training_sampling(config: LibraConfig) -> Sampling:
    return Sampling(config.n_samples, config.max_new_tokens, config.temperature, config.top_p)


def ledger_path(context: StageContext) -> Path:
    return context.run.ledger / f"attempt_{context.run.attempt:03d}.jsonl"
