"""The trainer's run: load, publish what was loaded, then train each batch that appears and publish what comes of it."""

from __future__ import annotations

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
from stages.members import members
from stages.stopping import StopRequestedError
from stages.trainer.checkpoints import Checkpoints
from stages.trainer.consumption import check_consumable
from stages.trainer.hf_weights import export_shards
from stages.trainer.parallel import RankGrid, TrainerRanks, batch_timeout_s, connected
from stages.trainer.policy import Policy, UpdateResult
from stages.trainer.probe import probe
from stages.trainer.schedule import learning_rate
from stages.weights.collect import collect
from stages.weights.hf_folder import other_tokenizer
from stages.weights.manifest import Manifest, Probe
from stages.weights.proof import allowed_difference_nats, probe_change_nats, resolution_nats
from stages.weights.publish import publish
from stages.weights.refresh import request_refresh

SECONDS = ("wait_for_batch", "recompute_logprobs", "grpo_update", "publish_weights", "wait_acks")
BACKENDS = {"megatron_core": Policy.load}
"""By train_backend."""
SYNCS = {"restart": request_refresh}
"""By rollout_weight_sync_mode."""


class Wish(IntEnum):
    """What a rank was asked to do; of several ranks' the highest counts."""

    GO_ON = 0
    CHECKPOINT = 1
    LEAVE = 2


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
        return Trainer(context, policy, grid, checkpoints, step).run()


def set_threads(context: StageContext) -> None:
    """Share the processors of this node among its ranks, unless OMP_NUM_THREADS decides."""
    if "OMP_NUM_THREADS" not in os.environ:
        ranks = min(context.world_size, context.plan.train.gpus_per_node)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


@dataclass
class Trainer:
    """All ranks run this in step; rank 0 alone talks to the instances and writes records.

    `step` counts the optimizer steps behind the present weights, so it is also their version; `published` is the newest
    version that has been published.
    """

    context: StageContext
    policy: Policy
    grid: RankGrid
    checkpoints: Checkpoints
    step: int = 0
    published: int = 0
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
        self._refresh(self.step, seconds=dict.fromkeys(SECONDS, 0.0))
        while self.step < self.context.config.total_steps:
            started_s = time.monotonic()
            with self.context.recorder.span("step", step=self.step, version=self.step):
                self._train()
            self.checkpoints.took_step(time.monotonic() - started_s)
            self.checkpoints.save_when_due(self.step)
        self._agree_to_go_on()

    def _nothing_left(self) -> dict[str, Any]:
        message = nothing_left(self.context.config, self.step)
        if self.grid.is_first:
            print(message, flush=True)
        return {"steps": self.step, "message": message}

    def _end_with_checkpoint(self) -> dict[str, Any]:
        """What has been trained since the last checkpoint is saved; a save that fails here is an error."""
        request = self.context.stop_request()
        if self.grid.is_first and request is not None:
            print(f"asked to stop ({request.reason}) at step {self.step}", flush=True)
        self.checkpoints.save(self.step)
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
        except StopRequestedError:
            # The step is taken, although the wait for its version was cut short.
            self._write_receipt(step, batch, result, seconds)
            raise
        self._write_receipt(step, batch, result, seconds)
        if self.grid.is_first:
            # A controller that is started again goes on from the published version: it looks for the batches behind it.
            before = min(self.published, self.checkpoints.first_needed_batch(self.step))
            collect(self.context, batches_before=before)

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
        found = None
        with suppress(StoppedError, StopRequestedError):
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

    def _agree_to_go_on(self) -> None:
        """Collective. Raises StoppedError, else StopRequestedError, on all ranks when one of them was asked to."""
        requested = Wish.GO_ON if self.context.stop_request() is None else Wish.CHECKPOINT
        wish = self.grid.highest(Wish.LEAVE if self.context.stop.is_set() else requested)
        if wish == Wish.LEAVE:
            raise StoppedError("a trainer rank was asked to stop")
        if wish == Wish.CHECKPOINT:
            raise StopRequestedError("a trainer rank was asked to end with a checkpoint")

    def _is_published(self, version: int) -> bool:
        config = self.context.config
        return version % config.sync_interval == 0 or version == config.total_steps

    def _refresh(self, version: int, seconds: dict[str, float]) -> None:
        """Publish the present weights as `version`; rank 0 waits until every instance has proved them."""
        with self._timed("publish_weights", seconds, version=version):
            manifest = self._publish(version)
            self.published = version
            if self.grid.is_first:
                if version:
                    self.context.recorder.flow_end("step", version - 1)
                self.context.recorder.flow_start("version", version)
        if self.grid.is_first:
            with self._timed("wait_acks", seconds, version=version):
                self._wait_acks(manifest, seconds["publish_weights"])
            self._say_when_the_proof_is_blind(manifest)
        # The other ranks stay here, so that their clocks for the next batch do not run while instances load or start.
        self._agree_to_go_on()

    def _publish(self, version: int) -> Manifest:
        config = self.context.config
        return publish(
            self.context.run,
            version=version,
            step=version,
            tensors=export_shards(self.policy.trainable.module, self.policy.architecture, self.grid),
            probe=probe(self.policy),
            source_folder=Path(config.model_path),
            options=config.weights,
            ranks=TrainerRanks(self.grid),
            tokenizer_folder=other_tokenizer(config),
        )

    def _wait_acks(self, manifest: Manifest, publish_s: float) -> None:
        """When this rank, the first, is asked to stop meanwhile, the others must hear of it before it leaves."""
        instances = members(self.context.run, self.context.plan)
        sync = SYNCS[self.context.config.rollout_weight_sync_mode]
        with suppress(StoppedError, StopRequestedError):
            sync(self.context, manifest, instances, publish_s, self._check_wishes)

    def _say_when_the_proof_is_blind(self, manifest: Manifest) -> None:
        """Once: when a version is so close to the one before that the proof of load cannot tell them apart."""
        before, self.last_probe = self.last_probe, manifest.probe
        if before is None or self.told_of_blindness:
            return
        config, change = self.context.config, probe_change_nats(before, manifest.probe)
        if change <= allowed_difference_nats(
            config.weights.proof_tolerance, resolution_nats(config), before, manifest.probe
        ):
            self.told_of_blindness = True
            print(
                f"version {manifest.version} moved the probe by {change:.1e} nats: too little for the proof of load, which would"
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
