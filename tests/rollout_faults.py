"""The server with two faults of real engines that can be switched on while it runs, to show that the proof catches them.

A fault is on while a file of its name exists in the folder FAULTS. `forgotten_repack`: a head tied to the embedding
keeps multiplying with its old packed weight. `forgotten_reset`: the prefix cache survives the swap.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from starlette.types import ASGIApp, Scope

from stages.rollout import worker
from stages.rollout.compat import VllmEngine
from stages.rollout.guard import GuardMiddleware
from stages.rollout.reload import Reloads
from stages.rollout.settings import ServerSettings
from traces.recorder import Recorder

FOLDER_VARIABLE = "FAULTS"


def is_on(fault: str) -> bool:
    return (Path(os.environ[FOLDER_VARIABLE]) / fault).exists()


def _forget(model: torch.nn.Module) -> None:
    """In place of the repacking: do nothing."""


class FaultyWorker(worker.WeightWorker):
    def libra_swap(self, version: int, digest: str) -> dict[str, Any]:
        repack = worker._repack_shared
        if is_on("forgotten_repack"):
            worker._repack_shared = _forget
        try:
            return super().libra_swap(version, digest)
        finally:
            worker._repack_shared = repack


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
