"""The callable that submitit runs in every task of every step."""

from __future__ import annotations

import gc
import importlib
import os
import threading
from typing import Any

import submitit

from stages.context import StoppedError, open_context
from stages.process import PRIVATE_UMASK, die_with_parent, install_stop_handlers


def run_stage(role: str, run_dir: str, attempt: int, name: str) -> dict[str, Any]:
    """Run one task of a stage; its place comes from submitit's environment (Slurm or local).

    Returns the stage's small JSON-able result, `{"stopped": True}` when it was asked to stop. A result is what the
    supervisor takes for success, so failure is an exception, never sys.exit.
    """
    die_with_parent()
    os.umask(PRIVATE_UMASK)
    stop = threading.Event()
    install_stop_handlers(stop)
    place = submitit.JobEnvironment()
    with open_context(
        role,
        run_dir,
        name=name,
        attempt=attempt,
        rank=place.global_rank,
        world_size=place.num_tasks,
        local_rank=place.local_rank,
    ) as context:
        context.stop = stop
        stage = importlib.import_module(f"stages.{role}.stage")
        gc.freeze()  # what was imported stays: a full collection would stop all threads, some of which read or publish weights
        print(
            f"{name} rank {context.rank}/{context.world_size} pid {os.getpid()} cpus {len(os.sched_getaffinity(0))}",
            flush=True,
        )
        try:
            result: dict[str, Any] = stage.run(context)
        except StoppedError:
            return {"stopped": True}
        return result
