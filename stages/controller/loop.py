"""The training loop of the controller: fill, collect, write batches, follow the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from stages.batches import BatchManifest, read_batch, write_batch
from stages.context import StageContext
from stages.controller.batching import build_batch, describe_groups
from stages.controller.dispatcher import Dispatcher
from stages.controller.groups import FinishedGroup
from stages.controller.history import History
from stages.controller.ledger import Trained
from stages.controller.metrics import MetricsFile, StepMetrics
from stages.controller.overlong import OverlongPunishment
from stages.controller.progress import Progress
from stages.controller.staleness import newest_allowed_step
from traces.recorder import Span

Result = TypeVar("Result")
POLL_S = 0.01
HANGING_SHARE = 0.5
"""A request that is away for this share of the collection timeout hangs; a younger one may still be answered."""


class BatchCollectionTimeoutError(TimeoutError):
    """A batch did not fill in global_resource_planner.runtime_batch_collection_timeout_s, nor after its retries."""


@dataclass
class TrainingLoop:
    """Runs until the trainer has done `total_steps` and every instance serves the last version.

    A batch is written as soon as it is complete. No more than max_head_offpolicyness + 1 batches can wait for the
    trainer, because no group starts that would belong to a later one (see `staleness`); recorded ones that a resumed run
    trains again (`manifests`, from step `progress.trained_steps` on) come on top. `history` has the lines of the steps
    before, and gets those of the steps to come.
    """

    context: StageContext
    dispatcher: Dispatcher
    progress: Progress
    metrics: MetricsFile
    manifests: dict[int, BatchManifest] = field(default_factory=dict)
    history: History = field(default_factory=History)
    next_batch: int = field(init=False)
    step_metrics: StepMetrics = field(init=False)
    _reported: int = field(init=False)
    _due_since_s: float = 0.0
    _retries: int = 0

    def __post_init__(self) -> None:
        self.step_metrics = StepMetrics(self.context.config.total_steps)
        self.next_batch = self.progress.trained_steps + len(self.manifests)
        self._reported = self.history.num_reported

    async def run(self) -> None:
        """Raises BatchCollectionTimeoutError, TrainerSilentError, and what the dispatcher raises."""
        self._due_since_s = time.monotonic()
        waiting: Span | None = None
        try:
            while not self.progress.is_complete:
                self._follow_trainer()
                waiting = self._change_span(waiting)
                self.dispatcher.fill(self.progress.served_version)
                await self._write_batches()
                await self.dispatcher.wait(POLL_S)
            self._report()
        finally:
            if waiting is not None:
                waiting.__exit__(None, None, None)

    def _follow_trainer(self) -> None:
        for step in self.progress.look(self.next_batch):
            self.dispatcher.ledger.record([Trained(step)])
        self._report()

    def _report(self) -> None:
        """One line for each step whose records are all there."""
        while self._reported < self.progress.trained_steps:
            version = self.progress.newest_published(self._reported + 1)
            if version > self.progress.served_version:
                return
            self._report_step(self._reported, version)
            self._reported += 1

    def _report_step(self, step: int, version: int) -> None:
        if step in self.history.steps:
            return
        seen = step in self.progress.receipts
        receipt = self.progress.receipts.get(step) or self._read(self.context.run.batch(step) / "trained.json")
        manifest = self.manifests.get(step) or self._old_manifest(step)
        if receipt is None or manifest is None:
            return  # of a step that nobody saw end, and whose files are gone
        refreshed = None
        if version == step + 1:
            refreshed = self.progress.refreshed.get(version) or self._read(self.context.run.refreshed_json(version))
        step_s = None if seen else sum(receipt["seconds"].values())
        line = self.step_metrics.line(manifest, receipt, refreshed, version, step_s)
        self.metrics.write(line)
        self.history.add(line)
        self._trace(step, line)

    def _read(self, path: Path) -> dict[str, Any] | None:
        """A record that an older attempt may have left, about a step that it trained for good."""
        return self.context.run.read(path, any_attempt=True, skip_damaged=True)

    def _old_manifest(self, step: int) -> BatchManifest | None:
        found = read_batch(self.context.run, step)
        return None if found is None else found[1]

    async def _write_batches(self) -> None:
        while (step := self.next_batch) < self.context.config.total_steps:
            groups = self.dispatcher.take(step)
            if groups is None:
                await self._check_collection(step)
                return
            self.manifests[step] = await _unbroken(asyncio.to_thread(self._write, step, groups))
            self.next_batch += 1
            self._due_since_s, self._retries = time.monotonic(), 0

    def _write(self, step: int, groups: list[FinishedGroup]) -> BatchManifest:
        recorder = self.context.recorder
        with recorder.span("build_batch", step=step) as span:
            for group in groups:
                recorder.flow_end("trajectory", group.group)
            config = self.context.config
            overlong = OverlongPunishment.of(config)
            batch = build_batch(groups, normalize_advantage=config.algorithm.normalize_advantage, overlong=overlong)
            self.dispatcher.ledger.sync()
            manifest = write_batch(self.context.run, step, batch, **describe_groups(groups, step, overlong))
            recorder.flow_start("batch", step)
            span.add(sequences=manifest.sequences, tokens=manifest.tokens)
        return manifest

    async def _check_collection(self, step: int) -> None:
        """The clock of a batch runs while its groups may be generated and somebody can; each retry starts it again.

        A retry gives up what hangs and keeps finished groups and younger requests.
        """
        planner = self.context.config.global_resource_planner
        timeout_s, retries = planner.runtime_batch_collection_timeout_s, planner.runtime_batch_collection_max_retries
        now = time.monotonic()
        pool = self.dispatcher.answerer.pool
        too_early = step > newest_allowed_step(self.dispatcher.bounds, self.progress.served_version)
        if too_early or pool.is_waiting_for_a_replacement():
            self._due_since_s = now
        if now - self._due_since_s <= timeout_s:
            return
        state = self._describe(step, timeout_s)
        if self._retries >= retries:
            raise BatchCollectionTimeoutError(
                f"{state}; {retries} retries (global_resource_planner.runtime_batch_collection_max_retries)"
            )
        self._retries += 1
        given_up = await self.dispatcher.give_up(now - HANGING_SHARE * timeout_s)
        print(f"{state}; gave up {given_up} groups, retry {self._retries} of {retries}", flush=True)
        self._due_since_s = time.monotonic()

    def _describe(self, step: int, timeout_s: float) -> str:
        dispatcher = self.dispatcher
        return (
            f"batch {step} has {dispatcher.num_waiting} of {dispatcher.bounds.groups_per_batch} groups after "
            f"{timeout_s:.0f} s (global_resource_planner.runtime_batch_collection_timeout_s): "
            f"{dispatcher.describe()}; instances: {dispatcher.answerer.pool.describe()}"
        )

    def _change_span(self, current: Span | None) -> Span | None:
        """Record what the loop waits for: collect_batch while groups are in flight, else the trainer or its weights."""
        phase = self._phase()
        if current is not None and current.phase == phase:
            return current
        if current is not None:
            current.__exit__(None, None, None)
        return self.context.recorder.span(phase, step=self.next_batch).__enter__()

    def _phase(self) -> str:
        if self.dispatcher.open:
            return "collect_batch"
        if self.progress.trained_steps < self.next_batch:
            return "wait_for_trainer"
        return "wait_for_weights"

    def _trace(self, step: int, line: dict[str, float]) -> None:
        recorder = self.context.recorder
        recorder.counter("reward", line["reward"], step=step)
        recorder.counter("tokens_per_s", line["tokens_per_s"], step=step)
        recorder.counter("staleness", line["staleness_max"], step=step)
        recorder.counter("version", line["version"], step=step)
        print(
            f"step {step + 1}/{line['total_steps']} reward {line['reward']:.3f} {line['tokens_per_s']:.0f} tokens/s "
            f"staleness {line['staleness_mean']:.2f} version {line['version']} sync {line['sync_s']:.3f} s",
            flush=True,
        )


async def _unbroken(work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work` to its end also when cancelled meanwhile: a thread goes on anyway, and needs the open ledger."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
