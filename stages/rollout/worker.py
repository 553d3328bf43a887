"""What runs inside every vLLM worker process: read a version beside the running model, then put it into the model.

vLLM mixes `WeightWorker` into its worker class (`--worker-extension-cls`); methods are called on all ranks by name.
Arguments and results are plain JSON-like values.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stages.rundir import RunDir
from stages.weights.errors import WeightsError
from stages.weights.reader import load_manifest, read_verified


@dataclass
class _Stage:
    """A version in host memory, or on its way there. `tensors` is whole once `done` is set and `error` is empty."""

    version: int
    digest: str
    done: threading.Event = field(default_factory=threading.Event)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    error: str = ""
    tensor: str = ""


class WeightWorker:
    """Attributes of vLLM's worker that are used: `model_runner` (its model and `reload_weights`) and `device`."""

    model_runner: Any
    device: torch.device
    libra_stage: _Stage | None = None

    def libra_prepare(self, run_root: str, run_id: str, attempt: int, writer: str, version: int, digest: str) -> None:
        """Start reading in a thread of its own: this call runs in the engine's loop, which must go on generating."""
        stage = _Stage(version, digest)
        self.libra_stage = stage
        run = RunDir(Path(run_root), run_id, attempt, writer)
        threading.Thread(target=_read, args=(run, stage), name="libra-prepare", daemon=True).start()

    def libra_prepared(self) -> dict[str, Any]:
        stage = self.libra_stage
        if stage is None:
            return {"done": False, "error": "nothing was ordered", "tensor": ""}
        return {"done": stage.done.is_set(), "error": stage.error, "tensor": stage.tensor}

    def libra_swap(self, version: int, digest: str) -> dict[str, Any]:
        """Put the prepared version into the model; only while the engine is paused.

        Raises RuntimeError when it is not prepared. The staged tensors are gone afterwards.
        """
        stage, self.libra_stage = self.libra_stage, None
        if (
            stage is None
            or not stage.done.is_set()
            or stage.error
            or (stage.version, stage.digest) != (version, digest)
        ):
            raise RuntimeError(f"version {version} with digest {digest} is not prepared in this worker")
        started_s = time.monotonic()
        self.model_runner.reload_weights(weights_iterator=iter(stage.tensors.items()))
        if self.device.type == "cpu":
            _repack_shared(self.model_runner.get_model())
        return {"tensors": len(stage.tensors), "seconds": time.monotonic() - started_s}


def _read(run: RunDir, stage: _Stage) -> None:
    try:
        manifest = load_manifest(run, stage.version, stage.digest)
        stage.tensors = read_verified(run, manifest)
    except (WeightsError, OSError) as error:
        stage.error, stage.tensor = str(error), getattr(error, "tensor", "")
    except Exception as error:
        stage.error = f"reading failed: {error!r}"
        raise
    finally:
        stage.done.set()


@torch.no_grad()
def _repack_shared(model: torch.nn.Module) -> None:
    """Pack anew the layers whose weight belongs to another layer too (a head tied to the embedding).

    vLLM's CPU layers multiply with a packed copy of their weight (`layer.cpu_linear`). Its layer-wise reload loads a
    shared weight through one of its layers and packs it there; the other one keeps multiplying with the old copy (seen
    with vLLM 0.32: HTTP 200, log-probs off by 0.4).
    """
    owner: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.numel() == 0:
            continue
        first = owner.setdefault(id(weight), layer)
        if first is not layer:
            for sharer in (first, layer):
                if hasattr(sharer, "cpu_linear"):
                    sharer.quant_method.process_weights_after_loading(sharer)  # type: ignore[operator, union-attr]
