"""The controller's run: evaluate, train, evaluate, sum up, end the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from conf.schema import LibraConfig
from stages.checkpoint import newest
from stages.checkpoint.over import is_over, nothing_left
from stages.context import StageContext
from stages.controller.answers import Answerer
from stages.controller.client import CompletionClient, Sampling
from stages.controller.dispatcher import Dispatcher, Limits
from stages.controller.evaluation import Evaluation, Evaluator
from stages.controller.history import AFTER, BEFORE, History, read_history
from stages.controller.instances import InstancePool
from stages.controller.loop import TrainingLoop
from stages.controller.metrics import MetricsFile
from stages.controller.progress import Progress
from stages.controller.resume import Position, check_wishes, find_position, wait_for_trainer_start
from stages.controller.staleness import Bounds
from stages.controller.summary import Summary
from stages.controller.tasks import make_task
from stages.controller.tokenizer import PolicyTokenizer
from stages.desired import end_run
from stages.files import WaitTimeoutError, wait_for
from stages.stopping import StopRequestedError
from stages.weights.patience import absence_s, load_s

Result = TypeVar("Result")
STOP_POLL_S = 0.05


def run(context: StageContext) -> dict[str, Any]:
    """One whole run, or the rest of one; returns the summary, or {"stopped_at": trained steps} after a stop request.

    Raises StoppedError when asked to leave, and named errors of its parts.
    """
    bounds = Bounds.of(context.config)
    progress = make_progress(context)
    try:
        saved = newest(context.run, tell=lambda _warning: None)  # the trainer, who loads it, warns
        progress.trained_steps = 0 if saved is None else saved.step
        first_version = wait_for_trainer_start(context)
        if is_over(context.run, context.config, first_version):
            return _end_at_once(context, first_version)
        position = find_position(context.run, first_version)
        with position.ledger:
            progress = make_progress(context, position)
            wait_for_first_weights(context, progress)
            return asyncio.run(until_stopped(context, _run(context, bounds, progress, position)))
    except StopRequestedError as stop:
        print(f"{stop}; stopped at step {progress.trained_steps}", flush=True)
        return {"stopped_at": progress.trained_steps}


def _end_at_once(context: StageContext, step: int) -> dict[str, Any]:
    message = nothing_left(context.config, step)
    print(message, flush=True)
    end_run(context.run, "success", message)
    return {"steps": step, "message": message}


async def _run(context: StageContext, bounds: Bounds, progress: Progress, position: Position) -> dict[str, Any]:
    config, run_dir, ledger = context.config, context.run, position.ledger
    history = read_history(run_dir.metrics_jsonl)
    summary = Summary.of(run_dir, is_first=position.is_first)
    with MetricsFile(run_dir.metrics_jsonl) as metrics:
        if not position.is_first:
            _tell_where(context, position, metrics, history)
        async with make_client(context) as client:
            answerer = await asyncio.to_thread(make_answerer, context, client)
            evaluator = make_evaluator(config, answerer)
            if history.before is None and progress.served_version == 0:
                summary.before = await _evaluate(context, evaluator, metrics, version=0, when=BEFORE)
            summary.started_steps = time.time()
            dispatcher = Dispatcher(answerer, ledger, bounds, training_sampling(config), make_limits(config))
            loop = TrainingLoop(context, dispatcher, progress, metrics, position.manifests, history)
            try:
                await loop.run()
            finally:
                await dispatcher.close()
            summary.ended_steps = time.time()
            summary.after = await _evaluate(context, evaluator, metrics, version=config.total_steps, when=AFTER)
        payload = summary.write(progress, ledger.state, history)
    end_run(run_dir, "success", f"{config.total_steps} steps trained")
    return payload


def _tell_where(context: StageContext, position: Position, metrics: MetricsFile, history: History) -> None:
    """In metrics.jsonl lines of steps from here on are void: those steps are trained again, or were never trained for good."""
    record = {"event": "resumed", "attempt": context.run.attempt, "from_step": position.trained_steps}
    metrics.write(record)
    history.add(record)
    state = position.ledger.state
    print(
        f"going on at step {position.trained_steps} with {len(position.manifests)} recorded batches; "
        f"{len(state.requeued)} prompts are asked again, the next new one is {state.next_prompt}",
        flush=True,
    )


async def _evaluate(
    context: StageContext, evaluator: Evaluator, metrics: MetricsFile, *, version: int, when: str
) -> Evaluation | None:
    if not context.config.launch.evaluate:
        return None
    evaluation = await evaluator.evaluate(version)
    metrics.write({"event": "evaluation", "when": when, **asdict(evaluation)})
    print(
        f"version {version}: greedy {evaluation.greedy_reward:.3f}, sampled {evaluation.sampled_reward:.3f} "
        f"on {evaluation.problems} held-out problems ({evaluation.seconds:.1f} s)",
        flush=True,
    )
    return evaluation


async def until_stopped(context: StageContext, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; cancels it and raises StoppedError or StopRequestedError as soon as the stage is asked to stop."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            check_wishes(context)
            await asyncio.wait([task], timeout=STOP_POLL_S)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def wait_for_first_weights(context: StageContext, progress: Progress) -> None:
    """Wait until every instance has proved the version that the trainer starts from.

    Raises WaitTimeoutError, StoppedError, StopRequestedError.
    """
    config, version = context.config, progress.first_version
    deadline_s = config.rollout.ready_timeout_s + config.weights.refresh_timeout_s
    pool = make_pool(context)
    with context.recorder.span("wait_for_instances"):

        def look() -> bool | None:
            progress.look(progress.trained_steps)
            return True if progress.served_version >= 0 else None

        try:
            wait_for(
                look,
                deadline_s=deadline_s,
                awaited=f"{context.run.refreshed_json(version)} (every instance serving version {version})",
                from_whom="the trainer",
                check=lambda: check_wishes(context),
            )
        except WaitTimeoutError as error:
            error.add_note(f"instances: {pool.describe()}")
            raise


def make_progress(context: StageContext, position: Position | None = None) -> Progress:
    """Where the run is; without `position`, at its beginning."""
    config = context.config
    progress = Progress(context.run, config.total_steps, config.sync_interval, config.algorithm.step_timeout_s)
    if position is not None:
        progress.first_version, progress.served_version = position.first_version, position.served_version
        progress.trained_steps = position.trained_steps
    return progress


def make_pool(context: StageContext) -> InstancePool:
    config = context.config
    return InstancePool(
        context.run,
        context.plan.rollout.instances,
        heartbeat_timeout_s=config.rollout.heartbeat_timeout_s,
        reload_keeps_requests=config.rollout_weight_reload_method == "inplace",
        heartbeat_interval_s=config.rollout.heartbeat_interval_s,
        absence_s=absence_s(config) + load_s(config),
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
