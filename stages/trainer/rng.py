"""The random states of a trainer rank as tensors. Training draws nothing today; whatever comes to draw resumes exactly."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

PREFIX = "rng."


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Python's, numpy's, torch's for the CPU, and on a GPU torch's and those of megatron-core's tracker, on the host."""
    state = {f"{PREFIX}torch": torch.get_rng_state(), **_python_state(), **_numpy_state()}
    if device.type == "cuda":
        state[f"{PREFIX}cuda"] = torch.cuda.get_rng_state(device)
        tracked: Mapping[str, torch.Tensor] = get_cuda_rng_tracker().get_states()
        state |= {f"{PREFIX}tracker.{name}": value for name, value in tracked.items()}
    return state


def set_rng_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Inverse of `rng_state`."""
    torch.set_rng_state(state[f"{PREFIX}torch"])
    _set_python_state(state)
    _set_numpy_state(state)
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[f"{PREFIX}cuda"], device)
        start = f"{PREFIX}tracker."
        tracked = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
        get_cuda_rng_tracker().set_states(tracked)


def _python_state() -> dict[str, torch.Tensor]:
    version, words, spare = random.getstate()
    return {
        f"{PREFIX}python": torch.tensor([version, *words], dtype=torch.int64),
        f"{PREFIX}python_spare": torch.tensor([spare or 0.0], dtype=torch.float64),
        f"{PREFIX}python_has_spare": torch.tensor([int(spare is not None)], dtype=torch.int64),
    }


def _set_python_state(state: Mapping[str, torch.Tensor]) -> None:
    version, *words = state[f"{PREFIX}python"].tolist()
    has_spare = bool(state[f"{PREFIX}python_has_spare"].item())
    random.setstate((version, tuple(words), state[f"{PREFIX}python_spare"].item() if has_spare else None))


def _numpy_state() -> dict[str, torch.Tensor]:
    """Of numpy's global generator, a Mersenne twister like Python's."""
    _, words, position, has_spare, spare = np.random.get_state(legacy=True)
    return {
        f"{PREFIX}numpy": torch.tensor([position, has_spare, *np.asarray(words).tolist()], dtype=torch.int64),
        f"{PREFIX}numpy_spare": torch.tensor([spare], dtype=torch.float64),
    }


def _set_numpy_state(state: Mapping[str, torch.Tensor]) -> None:
    position, has_spare, *words = state[f"{PREFIX}numpy"].tolist()
    spare = state[f"{PREFIX}numpy_spare"].item()
    np.random.set_state(("MT19937", np.asarray(words, np.uint32), position, has_spare, spare))
