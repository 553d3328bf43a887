"""Train one recorded batch without rollout, to look at a step again: nothing is published, no record of the run changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.batches import read_batch
from stages.context import StageContext
from stages.rundir import RunDir, RunDirectoryError
from stages.trainer.parallel import connected
from stages.trainer.policy import Policy
from stages.trainer.schedule import learning_rate
from stages.trainer.stage import set_threads


def replay(context: StageContext, step: int, version: int | None = None) -> dict[str, Any]:
    """Load the weights of `version` (default: those that batch `step` was trained on) and take that step once, on one rank.

    Adam starts without history, so loss, gradient norm and log-probs repeat the run's, the new weights do not. With the
    version that generated the batch, the log-prob differences compare trainer and sampler on the same weights. Raises
    RunDirectoryError when the batch or the weights are gone.
    """
    found = read_batch(context.run, step)
    if found is None:
        raise RunDirectoryError(
            f"batch {step} is not in {context.run.batches}; present: {context.run.published_batches()}"
        )
    batch, _ = found
    version = step if version is None else version
    folder = _weights(context.run, version)
    set_threads(context)
    recorder, config = context.recorder, context.config
    with connected(context, tp=1) as grid:
        with recorder.span("load_model"):
            policy = Policy.load(folder, config, grid)
        with recorder.span("recompute_logprobs", step=step):
            proximal = policy.recompute_logprobs(batch) if config.recompute_logprobs else None
        with recorder.span("grpo_update", step=step):
            rate = learning_rate(step, config)
            result = policy.update(batch, proximal, version=version, learning_rate=rate)
    return {"step": step, "weights": str(folder), **vars(result)}


def _weights(run: RunDir, version: int) -> Path:
    folder = run.weights_version(version)
    if run.manifest(folder) is None:
        available = ", ".join(f"v{number:06d}" for number in run.published_versions()) or "none"
        raise RunDirectoryError(
            f"weights v{version:06d} are not in {run.weights}; present: {available} (choose with --weights)"
        )
    return folder
