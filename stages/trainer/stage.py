"""The trainer's run: load, publish what was loaded, then train each batch that appears and publish what comes of it.

A version is written and loaded by the instances beside the training (`stages.trainer.refresher`), as long as the next batch may
hold tokens of the version before; then the trainer waits until it is served. All ranks meet before each batch, before a version,
and at the end: there they learn of wishes to stop, and of what has failed meanwhile.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from stages.batches import Batch, read_batch
from stages.checkpoint.load import steps_to_try
from stages.checkpoint.over import is_over, nothing_left
from stages.context import StageContext, StoppedError
from stages.files import wait_for
from stages.stopping import StopRequestedError
from stages.trainer.checkpoints import Checkpoints
from stages.trainer.consumption import check_consumable
from stages.trainer.hf_weights import export_shards
from stages.trainer.parallel import RankGrid, TrainerRanks, batch_timeout_s, connected, refresh_timeout_s
from stages.trainer.policy import Policy, UpdateResult
from stages.trainer.probe import probe
from stages.trainer.refresher import Refresher, ServingFailedError
from stages.trainer.schedule import learning_rate
from stages.weights.manifest import Probe
from stages.weights.proof import allowed_difference_nats, probe_change_nats, resolution_nats

SECONDS = ("wait_for_batch", "recompute_logprobs", "grpo_update", "publish_weights", "wait_acks")
BACKENDS = {"megatron_core": Policy.load}
"""By train_backend."""


class Wish(IntEnum):
    """What a rank wants all to do; of several ranks' the highest counts. What failed can still be said after a checkpoint."""

    GO_ON = 0
    FAIL = 1
    CHECKPOINT = 2
    LEAVE = 3


def run(context: StageContext) -> dict[str, Any]:
    """Train until total_steps, from the newest checkpoint when there is one.

    Raises StoppedError, on all ranks at the same step, when one of them was asked to leave; a stop request ends it with a
    checkpoint and the result {"stopped_at": step, "checkpoint": step of the newest one}.
    """
    set_threads(context)
    with ExitStack() as stack:
        with context.recorder.span("set_up"):
            grid = stack.enter_context(connected(context, tp=context.plan.train.tp))
            saved = steps_to_try(context.run, TrainerRanks(grid))
            with context.recorder.span("load_model"):
                load = BACKENDS[context.config.train_backend]
                policy = load(Path(context.config.model_path), context.config, grid, read_weights=not saved)
            print(f"{policy.architecture.name} loaded: tp {grid.tp}, dp {grid.dp}, {grid.device}", flush=True)
            checkpoints = Checkpoints(context, policy, grid)
            step = checkpoints.resume(saved)
        gc.freeze()  # else every few steps all threads stop for a look at half a million objects that are here to stay
        refresher = stack.enter_context(Refresher(context, grid, checkpoints))
        return Trainer(context, policy, grid, checkpoints, refresher, step).run()


def set_threads(context: StageContext) -> None:
    """Share the processors of this node among its ranks, unless OMP_NUM_THREADS decides."""
    if "OMP_NUM_THREADS" not in os.environ:
        ranks = min(context.world_size, context.plan.train.gpus_per_node)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


@dataclass
class Trainer:
    """All ranks run this in step; rank 0 alone talks to the instances and writes records.

    `step` counts the optimizer steps behind the present weights, so it is also their version; `begun` is the newest version
    that was begun to be published, `served` the newest whose end was waited for, -1 for none.
    """

    context: StageContext
    policy: Policy
    grid: RankGrid
    checkpoints: Checkpoints
    refresher: Refresher
    step: int = 0
    begun: int = -1
    served: int = -1
    last_probe: Probe | None = None
    told_of_blindness: bool = False

    def run(self) -> dict[str, Any]:
        """Returns the number of steps that the weights have behind them."""
        if is_over(self.context.run, self.context.config, self.step):
            return self._nothing_left()
        try:
            self._train_all()
        except StopRequestedError:
            return self._end_with_checkpoint()
        return {"steps": self.step}

    def _train_all(self) -> None:
        seconds = dict.fromkeys(SECONDS, 0.0)
        self._refresh(self.step, seconds)
        self._wait_unless_ahead(seconds)
        while self.step < self.context.config.total_steps:
            started_s = time.monotonic()
            with self.context.recorder.span("step", step=self.step, version=self.step):
                self._train()
            self.checkpoints.took_step(time.monotonic() - started_s)
            self.checkpoints.save_when_due(self.step)
        self.refresher.finish()
        self._agree_to_go_on()

    def _nothing_left(self) -> dict[str, Any]:
        message = nothing_left(self.context.config, self.step)
        if self.grid.is_first:
            print(message, flush=True)
        return {"steps": self.step, "message": message}

    def _end_with_checkpoint(self) -> dict[str, Any]:
        """What has been trained since the last checkpoint is saved; a save, or a version, that fails here is an error."""
        request = self.context.stop_request()
        if self.grid.is_first and request is not None:
            print(f"asked to stop ({request.reason}) at step {self.step}", flush=True)
        self.refresher.cut_short()
        self.checkpoints.save(self.step)
        self.refresher.finish()
        self.refresher.raise_failure()
        return {"stopped_at": self.step, "checkpoint": self.checkpoints.saved_step}

    def _train(self) -> None:
        """Optimizer step `step`: batch `step` with version `step` of the weights, into version `step + 1`."""
        step, seconds = self.step, dict.fromkeys(SECONDS, 0.0)
        with self._timed("wait_for_batch", seconds):
            batch = self._next_batch(step)
            self.context.recorder.flow_end("batch", step)
        result = self.update(batch, step, seconds)
        self.step = step + 1
        if self.step == self.context.config.total_steps:
            # Before the last version is served: the run is declared over soon after, and then nobody waits long for this.
            self.checkpoints.save_when_due(self.step)
        try:
            if self._is_published(self.step):
                self._refresh(self.step, seconds)
            self._wait_unless_ahead(seconds)
        except (StoppedError, StopRequestedError):
            # The step is taken, although the wait for a version was cut short.
            self._write_receipt(step, batch, result, seconds)
            raise
        self._write_receipt(step, batch, result, seconds)

    def update(self, batch: Batch, step: int, seconds: dict[str, float]) -> UpdateResult:
        """Proximal log-probs when recompute_logprobs says so, then the GRPO update."""
        proximal = None
        if self.context.config.recompute_logprobs:
            with self._timed("recompute_logprobs", seconds):
                proximal = self.policy.recompute_logprobs(batch)
        with self._timed("grpo_update", seconds):
            rate = learning_rate(step, self.context.config)
            result = self.policy.update(batch, proximal, version=step, learning_rate=rate)
            if self.grid.is_first:
                self.context.recorder.flow_start("step", step)
        return result

    def _next_batch(self, step: int) -> Batch:
        """Wait until the controller has published batch `step`; every rank reads it itself.

        Ranks agree here whether to go on, so that none leaves a collective operation of another.
        """
        run, limit_s = self.context.run, batch_timeout_s(self.context.config, step)
        if self.begun > self.served:
            limit_s += refresh_timeout_s(self.context)  # an instance that loads may not generate
        found = None
        with suppress(StoppedError, StopRequestedError, ServingFailedError):
            found = wait_for(
                lambda: read_batch(run, step, own=True),
                deadline_s=limit_s,
                awaited=str(run.batch(step)),
                from_whom="the controller",
                check=self._check_wishes,
            )
        self._agree_to_go_on()
        assert found is not None
        check_consumable(found[0], step, self.context.config, self.policy.architecture.vocab_size)
        return found[0]

    def _check_wishes(self) -> None:
        """Ends a wait of this rank alone; what all do is agreed afterwards."""
        self.context.check_stop()
        self.context.check_stop_request()
        self.refresher.check()

    def _agree_to_go_on(self) -> None:
        """Collective: the ranks meet. Raises on all of them StoppedError or StopRequestedError, when one was asked to, or else
        what failed beside the training of one.
        """
        wish = self.grid.highest(self._wish())
        if wish == Wish.LEAVE:
            raise StoppedError("a trainer rank was asked to stop")
        if wish == Wish.CHECKPOINT:
            raise StopRequestedError("a trainer rank was asked to end with a checkpoint")
        if wish == Wish.FAIL:
            self.refresher.raise_failure()

    def _wish(self) -> Wish:
        if self.context.stop.is_set():
            return Wish.LEAVE
        if self.context.stop_request() is not None:
            return Wish.CHECKPOINT
        return Wish.FAIL if self.refresher.has_failed else Wish.GO_ON

    def _is_published(self, version: int) -> bool:
        config = self.context.config
        return version % config.sync_interval == 0 or version == config.total_steps

    def _refresh(self, version: int, seconds: dict[str, float]) -> None:
        """Begin to publish the present weights as `version`; the version before must be done with first."""
        if self.begun > self.served:
            self._wait(seconds)
        with self._timed("publish_weights", seconds, version=version):
            self.refresher.finish()
            self._agree_to_go_on()
            proof = probe(self.policy)
            shards = export_shards(self.policy.trainable.module, self.policy.architecture, self.grid)
            self.refresher.begin(version, shards, proof)
            self.begun = version
        if self.grid.is_first:
            self._say_when_the_proof_is_blind(version, proof)

    def _wait_unless_ahead(self, seconds: dict[str, float]) -> None:
        """Wait for the version under way, unless the next batch may hold only tokens of the version before.

        Otherwise the batch cannot come earlier, and its clock must not run while instances load or start.
        """
        config = self.context.config
        is_ahead = self.served >= 0 and self.step - self.served <= config.max_head_offpolicyness
        if self.begun > self.served and not (is_ahead and self.step < config.total_steps):
            self._wait(seconds)

    def _wait(self, seconds: dict[str, float]) -> None:
        with self._timed("wait_acks", seconds, version=self.begun):
            self.refresher.wait()
        self.served = self.begun
        self._agree_to_go_on()

    def _say_when_the_proof_is_blind(self, version: int, proof: Probe) -> None:
        """Once: when a version is so close to the one before that the proof of load cannot tell them apart."""
        before, self.last_probe = self.last_probe, proof
        if before is None or self.told_of_blindness:
            return
        config, change = self.context.config, probe_change_nats(before, proof)
        if change <= allowed_difference_nats(config.weights.proof_tolerance, resolution_nats(config), before, proof):
            self.told_of_blindness = True
            print(
                f"version {version} moved the probe by {change:.1e} nats: too little for the proof of load, which would"
                " pass an engine that kept the version before (said once)",
                flush=True,
            )

    def _write_receipt(self, step: int, batch: Batch, result: UpdateResult, seconds: dict[str, float]) -> None:
        if not self.grid.is_first:
            return
        receipt = {"step": step, "version": step + 1, "tokens": batch.num_tokens, "seconds": seconds, **asdict(result)}
        self.context.run.write(self.context.run.batch(step) / "trained.json", receipt)

    @contextmanager
    def _timed(self, phase: str, seconds: dict[str, float], version: int | None = None) -> Iterator[None]:
        """Record a phase, and add its length to `seconds[phase]`."""
        with self.context.recorder.span(phase, version=version) as span:
            yield
            self.grid.synchronize()
        seconds[phase] += span.duration_s
