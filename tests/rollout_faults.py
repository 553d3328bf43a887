"""The server with faults of real engines that can be switched on while it runs, to show that the proof catches them.

A fault is on while a file of its name exists in the folder FAULTS:
- `forgotten_repack`: a head tied to the embedding keeps multiplying with its old packed weight;
- `forgotten_reset`: the prefix cache survives the swap;
- `skipped_tensor`, `skipped_slice`: one copy, or the second half of one, is not carried out;
- `kept_version`: none is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from starlette.types import ASGIApp, Scope

from stages.rollout import compat_model, worker
from stages.rollout.compat import VllmEngine
from stages.rollout.engine_weights import EngineWeights
from stages.rollout.guard import GuardMiddleware
from stages.rollout.reload import Reloads
from stages.rollout.settings import ServerSettings
from traces.recorder import Recorder

FOLDER_VARIABLE = "FAULTS"
SKIPPED = 7
"""Index of the copy that is left out."""


def is_on(fault: str) -> bool:
    return (Path(os.environ[FOLDER_VARIABLE]) / fault).exists()


class FaultyWeights(EngineWeights):
    def _copy_into(self, targets: list[torch.Tensor]) -> None:
        before = [target.clone() for target in targets]
        super()._copy_into(targets)
        for index, (target, old) in enumerate(zip(targets, before, strict=True)):
            if is_on("kept_version") or (is_on("skipped_tensor") and index == SKIPPED):
                target.copy_(old)
            elif is_on("skipped_slice") and index == SKIPPED:
                half = len(target) // 2
                target[half:].copy_(old[half:])

    def _pack(self, version: Any) -> tuple[str, ...]:
        pack = compat_model.pack

        def pack_but_the_head(layer: Any) -> None:
            if type(layer).__name__ != "ParallelLMHead":
                pack(layer)

        if is_on("forgotten_repack"):
            compat_model.pack = pack_but_the_head
        try:
            return super()._pack(version)
        finally:
            compat_model.pack = pack


class FaultyWorker(worker.WeightWorker):
    def libra_start(self, run_id: str, start_folder: str, weights_dtype: str) -> dict[str, Any]:
        vars(worker)["EngineWeights"] = FaultyWeights
        return super().libra_start(run_id, start_folder, weights_dtype)


class FaultyEngine(VllmEngine):
    async def reset_caches(self) -> None:
        if not is_on("forgotten_reset"):
            await super().reset_caches()


class FaultyGuard(GuardMiddleware):
    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, make_reloads=_faulty_reloads)


def _faulty_reloads(scope: Scope, settings: ServerSettings) -> tuple[Reloads, Any]:
    engine = FaultyEngine(scope["app"].state.engine_client, settings.start_version)
    recorder = Recorder(Path(), "rollout", 0, 1, "faulty", enabled=False)
    return Reloads(settings, engine, recorder), engine.segments
