"""What runs inside every vLLM worker process: read a version beside the running model, then put it into the model.

vLLM mixes `WeightWorker` into its worker class (`--worker-extension-cls`); methods are called on all ranks by name.
Arguments and results are plain JSON-like values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stages.rollout.engine_weights import EngineWeights
from stages.rollout.preparation import Preparations
from stages.rundir import RunDir


class WeightWorker:
    """Attributes of vLLM's worker that are used: `model_runner` and `device`. Calls come from one thread."""

    model_runner: Any
    device: torch.device
    libra_weights: EngineWeights
    libra_preparations: Preparations

    def libra_start(self, run_id: str, start_folder: str, weights_dtype: str) -> dict[str, Any]:
        """Find out how versions get into this engine; called first, once. It was loaded from `start_folder`."""
        self.libra_weights = EngineWeights(self.model_runner, self.device, run_id, Path(start_folder), weights_dtype)
        self.libra_preparations = Preparations(self.libra_weights)
        return self.libra_weights.description()

    def libra_prepare(
        self, run_root: str, run_id: str, attempt: int, writer: str, version: int, digest: str, keep_s: float
    ) -> None:
        """Start reading: this call runs in the engine's loop, which must go on generating."""
        run = RunDir(Path(run_root), run_id, attempt, writer)
        self.libra_preparations.start(run, version, digest, keep_s)

    def libra_prepared(self) -> dict[str, Any]:
        return self.libra_preparations.state()

    def libra_swap(self, version: int, digest: str) -> dict[str, Any]:
        """Put the prepared version into the model; only while the engine is paused.

        Raises RuntimeError when it is not prepared (any more). "fault" of the report says what did not arrive.
        """
        with self.libra_preparations.taken(version, digest) as staged:
            return self.libra_weights.swap(staged)

    def libra_check(self, version: int, digest: str) -> dict[str, Any]:
        """Compare the model with the prepared version; as `libra_swap`, but nothing is changed."""
        with self.libra_preparations.taken(version, digest) as staged:
            return self.libra_weights.check(staged)
