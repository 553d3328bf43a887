"""Trainer ranks that take four steps at once, and two, a checkpoint and two: `python -m tests.checkpoint_worker ROOT`.

ROOT/work.json has the cases, all on one device; ROOT/NAME is a run directory with its model, options, batches; ROOT/NAME.RANK.json gets what
differed. Ranks are forked after the imports, which take longer than the work.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.batches import read_batch
from stages.checkpoint.load import steps_to_try
from stages.context import StageContext, open_context
from stages.trainer.checkpoints import Checkpoints
from stages.trainer.parallel import RankGrid, TrainerRanks, connected
from stages.trainer.policy import Policy, UpdateResult
from stages.trainer.probe import probe
from stages.trainer.schedule import learning_rate
from stages.trainer.state import state_to_save
from tests.checkpoint_kit import MODEL, SAVED_AT, TOTAL_STEPS, Case
from tests.fake_gpu import FakeGpu, install_streams


def main(root: Path) -> int:
    cases = [Case(**case) for case in json.loads((root / "work.json").read_text())]
    on_cpu = all(case.device == "cpu" for case in cases)
    # Forking spares the imports, but not where a parent may have touched CUDA.
    context: Any = multiprocessing.get_context("fork" if on_cpu else "spawn")
    ranks = max(case.ranks for case in cases)
    processes = [context.Process(target=run_rank, args=(root, cases, rank)) for rank in range(ranks)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        processes[0].join(0.2)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
    return int(any(process.exitcode != 0 for process in processes))


def run_rank(root: Path, cases: list[Case], rank: int) -> None:
    torch.set_num_threads(1)
    for case in cases:
        pretended = {case.offload, case.resumed_offload} != {None} and case.device == "cpu"
        if pretended:
            install_streams()
        if rank < case.ranks:
            place: dict[str, Any] = {"rank": rank, "world_size": case.ranks, "local_rank": rank}
            with (
                open_context("trainer", root / case.name, name="trainer", **place) as context,
                connected(context, tp=case.tp) as grid,
                FakeGpu() if pretended else nullcontext(),
            ):
                found = compare(root / MODEL, case, context, grid)
            (root / f"{case.name}.{rank}.json").write_text(json.dumps(found))


def compare(model: Path, case: Case, context: StageContext, grid: RankGrid) -> dict[str, Any]:
    straight = Policy.load(model, context.config, grid)
    results = [step(straight, context, number) for number in range(TOTAL_STEPS)]

    first = Policy.load(model, context.config, grid)
    for number in range(SAVED_AT):
        step(first, context, number)
    seed_all(7)
    Checkpoints(context, first, grid).save(SAVED_AT)
    drawn = draws(grid.device)

    resumed = Policy.load(model, replace(context.config, **case.resumed_options), grid, read_weights=False)
    with torch.no_grad():
        for parameter in resumed.trainable.module.parameters():
            parameter.fill_(torch.nan)  # whatever is not restored shows
    seed_all(8)
    resumed_at = Checkpoints(context, resumed, grid).resume(steps_to_try(context.run, TrainerRanks(grid)))
    redrawn = draws(grid.device)
    restored = differences(everything(first), everything(resumed))
    again = [step(resumed, context, number) for number in range(resumed_at, TOTAL_STEPS)]
    return {
        "resumed_at": resumed_at,
        "draws": [drawn, redrawn],
        "restored": restored,
        "probes": [list(probe(policy).logprobs) for policy in (straight, resumed)],
        "results": [[vars(result) for result in taken] for taken in (results[SAVED_AT:], again)],
        "differences": differences(everything(straight), everything(resumed)),
        "names": sorted(everything(resumed)),
        "changed": differences(everything(first), everything(resumed)),
    }


def step(policy: Policy, context: StageContext, number: int) -> UpdateResult:
    found = read_batch(context.run, number)
    assert found is not None
    proximal = policy.recompute_logprobs(found[0])
    rate = learning_rate(number, context.config)
    return policy.update(found[0], proximal, version=number, learning_rate=rate)


def everything(policy: Policy) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, without random states, and all parameters of this rank."""
    saved = {name: value for name, value in state_to_save(policy.trainable).items() if not name.startswith("rng.")}
    return saved | {f"whole.{name}": value.detach() for name, value in policy.trainable.module.named_parameters()}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    random.gauss(0.0, 1.0)  # leaves half of a pair behind, which is state too
    np.random.standard_normal(3)


def draws(device: torch.device) -> list[float]:
    numbers = [random.random(), random.gauss(0.0, 1.0), float(np.random.standard_normal()), float(np.random.random())]
    return [*numbers, float(torch.rand(())), float(torch.rand((), device=device))]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
