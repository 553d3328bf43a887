"""How long a busy vLLM engine on the CPU stands still for a refresh."""

from __future__ import annotations

import logging
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.weights_gpu.load import Load
from benchmarks.weights_gpu.model import Parameters, write_source
from benchmarks.weights_gpu.scene import Scene, publish_model, rollout_config, scene
from benchmarks.weights_model import Shape

WARM_UPS = 2
_MAX_MODEL_LEN = 256
_LOAD = (2, 2, 16, 64)
"""Requests, answers to each, prompt tokens, answer tokens."""
_START_LIMIT_S = 300.0


def measure_pause(place: Path, name: str, shape: Shape, dtype: str, refreshes: int) -> dict[str, Any]:
    """Medians over `refreshes` by the product's agent and server, with the run in `place`, which exists and is empty.

    Raises EngineEndedError, TimeoutError and what a refresh raises; the ends of the logs are then in the log.
    """
    config = rollout_config("cpu", dtype, place, _MAX_MODEL_LEN, eager=True, share=0.5)
    device = torch.device("cpu")
    parameters = Parameters(shape, dtype, device, config.weights.probe_tokens)
    write_source(place / "source", shape, dtype)
    publish_model(place, parameters, config)
    with scene(place, name, config, parameters, device) as made:
        try:
            made.instance.ensure_ready(_START_LIMIT_S)
            _refreshes(made, WARM_UPS)  # before the load: nothing is answered until a first version is proved
            made.instance.ensure_busy(Load(*_LOAD, vocab_size=shape.vocab_size))
            counted = _refreshes(made, refreshes)
        except Exception:
            logging.exception("the engine's logs:\n%s", made.instance.log_tails())
            raise
        failed = made.instance.counts.failed
    return {
        "engine_bytes": parameters.num_bytes,
        "engine_refreshes": refreshes,
        "engine_requests_failed": failed,
        "engine_ways": sorted({str(text) for refresh in counted for text in refresh["server_says"].values()}),
        **{
            key: round(median(refresh[name] for refresh in counted), 4)
            for key, name in (("paused_s", "paused_s"), ("engine_prepare_s", "prepare_s"), ("refresh_s", "refresh_s"))
        },
        "paused_worst_s": round(max(refresh["paused_s"] for refresh in counted), 4),
    }


def _refreshes(made: Scene, count: int) -> list[dict[str, Any]]:
    measured = []
    for _ in range(count):
        measured.append(made.refresh("inplace"))
        made.clean()
    return measured
