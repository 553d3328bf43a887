"""The trainer's run: load, publish version 0, then train each batch that appears and publish what comes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stages.batches import Batch, read_batch
from stages.context import StageContext, StoppedError
from stages.files import wait_for
from stages.trainer.consumption import check_consumable
from stages.trainer.hf_weights import export_shards
from stages.trainer.parallel import RankGrid, TrainerRanks, batch_timeout_s, connected
from stages.trainer.policy import Policy, UpdateResult
from stages.trainer.probe import probe
from stages.trainer.schedule import learning_rate
from stages.weights.collect import collect
from stages.weights.manifest import Manifest, Probe
from stages.weights.proof import allowed_difference_nats, probe_change_nats, resolution_nats
from stages.weights.publish import publish
from stages.weights.refresh import request_refresh

SECONDS = ("wait_for_batch", "recompute_logprobs", "grpo_update", "publish_weights", "wait_acks")
BACKENDS = {"megatron_core": Policy.load}
"""By train_backend."""
SYNCS = {"restart": request_refresh}
"""By rollout_weight_sync_mode."""


def run(context: StageContext) -> dict[str, Any]:
    """Train total_steps batches. Raises StoppedError, on all ranks at the same step, when one of them was asked to stop."""
    set_threads(context)
    with ExitStack() as stack:
        with context.recorder.span("set_up"):
            grid = stack.enter_context(connected(context, tp=context.plan.train.tp))
            with context.recorder.span("load_model"):
                load = BACKENDS[context.config.train_backend]
                policy = load(Path(context.config.model_path), context.config, grid)
        print(f"{policy.architecture.name} loaded: tp {grid.tp}, dp {grid.dp}, {grid.device}", flush=True)
        return Trainer(context, policy, grid).run()


def set_threads(context: StageContext) -> None:
    """Share the processors of this node among its ranks, unless OMP_NUM_THREADS decides."""
    if "OMP_NUM_THREADS" not in os.environ:
        ranks = min(context.world_size, context.plan.train.gpus_per_node)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


@dataclass
class Trainer:
    """All ranks run this in step; rank 0 alone talks to the instances and writes records."""

    context: StageContext
    policy: Policy
    grid: RankGrid
    last_probe: Probe | None = None
    told_of_blindness: bool = False

    def run(self) -> dict[str, Any]:
        """Returns the number of steps trained."""
        total_steps = self.context.config.total_steps
        self._refresh(version=0, seconds=dict.fromkeys(SECONDS, 0.0))
        for step in range(total_steps):
            with self.context.recorder.span("step", step=step, version=step):
                self._train(step)
        self._leave_together()
        return {"steps": total_steps}

    def _train(self, step: int) -> None:
        """Optimizer step `step`: batch `step` with version `step` of the weights, into version `step + 1`."""
        seconds = dict.fromkeys(SECONDS, 0.0)
        with self._timed("wait_for_batch", seconds):
            batch = self._next_batch(step)
            self.context.recorder.flow_end("batch", step)
        result = self.update(batch, step, seconds)
        if self._is_published(step + 1):
            self._refresh(step + 1, seconds)
        if self.grid.is_first:
            self._write_receipt(step, batch, result, seconds)
            collect(self.context)

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
        try:
            found = wait_for(
                lambda: read_batch(run, step),
                deadline_s=limit_s,
                awaited=str(run.batch(step)),
                from_whom="the controller",
                check=self.context.check_stop,
            )
        except StoppedError:
            self.context.stop.set()
        self._leave_together()
        assert found is not None
        check_consumable(found[0], step, self.context.config, self.policy.architecture.vocab_size)
        return found[0]

    def _leave_together(self) -> None:
        if self.grid.any_rank(self.context.stop.is_set()):
            raise StoppedError("a trainer rank was asked to stop")

    def _is_published(self, version: int) -> bool:
        config = self.context.config
        return version % config.sync_interval == 0 or version == config.total_steps

    def _refresh(self, version: int, seconds: dict[str, float]) -> None:
        """Publish the present weights as `version`; rank 0 waits until every instance has proved them."""
        with self._timed("publish_weights", seconds, version=version):
            manifest = self._publish(version)
            if self.grid.is_first:
                if version:
                    self.context.recorder.flow_end("step", version - 1)
                self.context.recorder.flow_start("version", version)
        is_served = True
        if self.grid.is_first:
            with self._timed("wait_acks", seconds, version=version):
                is_served = self._wait_acks(manifest, seconds["publish_weights"])
            self._say_when_the_proof_is_blind(manifest)
        # The other ranks stay here, so that their clocks for the next batch do not run while instances load or start.
        if self.grid.any_rank(not is_served):
            raise StoppedError(f"the trainer was asked to stop before version {version} was served")

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
        )

    def _wait_acks(self, manifest: Manifest, publish_s: float) -> bool:
        """False when this rank, the first, was asked to stop meanwhile: the others must hear of it before it leaves."""
        instances = [placement.name for placement in self.context.plan.rollout.instances]
        try:
            SYNCS[self.context.config.rollout_weight_sync_mode](self.context, manifest, instances, publish_s)
        except StoppedError:
            return False
        return True

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
        receipt = {"step": step, "version": step + 1, "tokens": batch.num_tokens, "seconds": seconds, **asdict(result)}
        self.context.run.write(self.context.run.batch(step) / "trained.json", receipt)

    @contextmanager
    def _timed(self, phase: str, seconds: dict[str, float], version: int | None = None) -> Iterator[None]:
        """Record a phase, and add its length to `seconds[phase]`."""
        with self.context.recorder.span(phase, version=version) as span:
            yield
            self.grid.synchronize()
        seconds[phase] += span.duration_s
