"""Train one recorded batch without rollout, to look at a step again: nothing is published, no record of the run changes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.batches import read_batch
from stages.context import StageContext
from stages.rundir import RunDir, RunDirectoryError
from stages.trainer.parallel import connected
from stages.trainer.policy import Policy
from stages.trainer.schedule import learning_rate
from stages.trainer.stage import set_threads
from stages.weights.errors import WeightsError
from stages.weights.export import export
from stages.weights.reader import load_manifest


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
    set_threads(context)
    recorder, config = context.recorder, context.config
    with whole_weights(context.run, version) as folder, connected(context, tp=1) as grid:
        with recorder.span("load_model"):
            policy = Policy.load(folder, config, grid)
        with recorder.span("recompute_logprobs", step=step):
            proximal = policy.recompute_logprobs(batch) if config.recompute_logprobs else None
        with recorder.span("grpo_update", step=step):
            rate = learning_rate(step, config)
            result = policy.update(batch, proximal, version=version, learning_rate=rate)
    return {"step": step, "weights": str(context.run.weights_version(version)), **vars(result)}


@contextmanager
def whole_weights(run: RunDir, version: int) -> Iterator[Path]:
    """A HF folder of a version: its own, or for one that is published as a delta a temporary one (TMPDIR).

    Raises RunDirectoryError when the version, or what it is a delta of, is not there or damaged.
    """
    folder = run.weights_version(version)
    record = run.manifest(folder)
    if record is None:
        available = ", ".join(f"v{number:06d}" for number in run.published_versions()) or "none"
        raise RunDirectoryError(
            f"weights v{version:06d} are not in {run.weights}; present: {available} (choose with --weights)"
        )
    if "delta" not in record:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="libra-replay-") as scratch:
        whole = Path(scratch) / folder.name
        try:
            export(run, load_manifest(run, version), whole)
        except WeightsError as problem:
            raise RunDirectoryError(f"weights v{version:06d} cannot be read: {problem}") from problem
        yield whole
