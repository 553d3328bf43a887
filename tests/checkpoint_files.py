"""Small checkpoints that tests save, spoil and load: one or two ranks, every number format."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from stages.checkpoint import Checkpoint
from stages.checkpoint.load import load_newest, steps_to_try
from stages.checkpoint.manifest import Fingerprint, Layout
from stages.checkpoint.save import save
from stages.rundir import RunDir
from stages.weights.ranks import RankGroup, SingleRank
from tests.weights_kit import run_ranks

TWO_RANKS = Layout(tp=1, dp=2, world_size=2, dtype="bfloat16")
ONE_RANK = Layout(tp=1, dp=1, world_size=1, dtype="bfloat16")
MODEL = Fingerprint("LlamaForCausalLM", "config-digest", "tokenizer-digest", "task-digest")


def state(rank: int, step: int = 1) -> dict[str, torch.Tensor]:
    """Every number format, an empty tensor, a scalar, and sizes that are no multiple of 8 bytes."""
    draw = torch.Generator().manual_seed(100 * step + rank)  # ranks are threads here
    return {
        "param.a": torch.randn(7, generator=draw).bfloat16(),
        "master.a": torch.randn(7, generator=draw),
        "exp_avg.b": torch.randn(3, 5, generator=draw),
        "empty": torch.empty(0),
        "adam.step": torch.tensor(float(step), dtype=torch.float64),
        "rng.torch": torch.randint(0, 255, (13,), dtype=torch.uint8, generator=draw),
        "rng.python": torch.randint(-(2**40), 2**40, (4,), dtype=torch.int64, generator=draw),
    }


def blank(rank: int = 0) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state(rank).items()}


def save_one(run: RunDir, step: int, **changes: Any) -> Checkpoint:
    options = {"tensors": state(0, step), "layout": ONE_RANK, "model": MODEL, "step_s": 1.5, "ranks": SingleRank()}
    return save(run, step=step, **{**options, **changes})


def save_two(run: RunDir, step: int, tensors: Callable[[int], dict[str, torch.Tensor]] = state) -> list[Future[Any]]:
    def body(ranks: RankGroup) -> Checkpoint:
        return save(run, step=step, tensors=tensors(ranks.rank), layout=TWO_RANKS, model=MODEL, step_s=0.0, ranks=ranks)

    return run_ranks(2, body)


def load_one(run: RunDir, **changes: Any) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    into: dict[str, torch.Tensor] = changes.pop("into", blank())
    options: dict[str, Any] = {"layout": ONE_RANK, "model": MODEL, "ranks": SingleRank(), **changes}
    return load_newest(run, steps_to_try(run, options["ranks"]), into=into, **options), into


def damage(path: Path) -> None:
    """Change the last byte, and nothing of the size."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
