"""The trainer ranks of test_trainer_equivalence: every layout in turn; rank 0 of a layout saves what it saw.

`python trainer_worker.py FOLDER RANKS`: FOLDER has work.json with the layouts, FOLDER/runs/LAYOUT is a run directory,
FOLDER/results/LAYOUT/MODEL.pt gets the results. Ranks are forked after the imports, which take longer than the work.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conf.schema import LibraConfig
from stages.batches import Batch, read_batch
from stages.context import open_context
from stages.trainer.hf_weights import export_slices
from stages.trainer.parallel import RankGrid, connected
from stages.trainer.policy import Policy
from stages.weights.boxes import Box


def main(folder: Path, ranks: int) -> int:
    """Exit status: 0 when every rank ended well. The first that fails ends the others."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(folder, rank)) for rank in range(ranks)]
    for process in processes:
        process.start()
    running = list(processes)
    while running:
        connection.wait([process.sentinel for process in running])
        for process in [process for process in running if not process.is_alive()]:
            running.remove(process)
            if process.exitcode != 0:
                for other in running:
                    other.terminate()
    return int(any(process.exitcode != 0 for process in processes))


def run_rank(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    work = json.loads((folder / "work.json").read_text())
    for layout in work["layouts"]:
        world_size = layout["tp"] * layout["dp"]
        if rank < world_size:
            run_layout(folder, layout, work["optimizer"], rank, world_size)


def run_layout(folder: Path, layout: dict[str, Any], optimizer: dict[str, Any], rank: int, world_size: int) -> None:
    run_dir = folder / "runs" / layout["name"]
    with open_context("trainer", run_dir, name="trainer", rank=rank, world_size=world_size, local_rank=rank) as context:
        found = read_batch(context.run, 1)
        assert found is not None
        with connected(context, tp=layout["tp"]) as grid:
            for model in layout["models"]:
                policy = Policy.load(folder / "models" / model, context.config, grid)
                results = look_at(policy, found[0])
                if model in layout["trained"]:
                    for micro_batch_size, recompute in layout["gradients"]:
                        key = f"micro_batch_{micro_batch_size}_recompute_{recompute}"
                        results[key] = gradients(policy, micro_batch_size, recompute, found[0])
                    results["optimizer"] = two_steps(
                        folder / "models" / model, context.config, grid, found[0], optimizer
                    )
                if grid.is_first:
                    torch.save(results, folder / "results" / layout["name"] / f"{model}.pt")


def look_at(policy: Policy, batch: Batch) -> dict[str, Any]:
    logprobs = policy.recompute_logprobs(batch)
    dist.all_reduce(logprobs, group=policy.grid.dp_group)
    return {
        "exported": whole_tensors(named_parameters(policy), policy),
        "logprobs": logprobs,
        "probe": policy.sequence_logprobs([3, 1, 4, 1, 5, 9, 2, 6]),
    }


def gradients(loaded: Policy, micro_batch_size: int, recompute: bool, batch: Batch) -> dict[str, Any]:
    """Loss, norm and gradients of one update at learning rate 0, which leaves the weights as they are.

    Against recomputed log-probs the KL term is zero with its gradient, so its coefficient is left out there.
    """
    config = replace(loaded.config, micro_batch_size=micro_batch_size, recompute_micro_batch_size=micro_batch_size)
    if recompute:
        config = replace(config, algorithm=replace(config.algorithm, kl_coef=0.0))
    policy = replace(loaded, config=config)
    proximal = policy.recompute_logprobs(batch) if recompute else None
    result = policy.update(batch, proximal, version=1, learning_rate=0.0)
    gather_reduced_gradients(policy)
    parameters = dict(policy.trainable.module.named_parameters())
    grads = {name: parameter.main_grad for name, parameter in parameters.items()}
    return {"result": vars(result), "gradients": whole_tensors(grads, policy)}


def gather_reduced_gradients(policy: Policy) -> None:
    """Complete the gradient buffers, of which each data-parallel rank holds one reduced shard."""
    grid = policy.grid
    for group in policy.trainable.wrapped.bucket_groups:
        for bucket in group.buckets:
            shard = bucket.grad_data.chunk(grid.dp)[grid.dp_rank].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=grid.dp_group)


def two_steps(
    model: Path, config: LibraConfig, grid: RankGrid, batch: Batch, optimizer: dict[str, Any]
) -> dict[str, Any]:
    """Gradient norms and weights of two Adam steps with clipping and weight decay."""
    algorithm = replace(
        config.algorithm, clip_grad_norm=optimizer["clip_grad_norm"], weight_decay=optimizer["weight_decay"]
    )
    policy = Policy.load(model, replace(config, algorithm=algorithm), grid)
    norms = [
        policy.update(batch, None, version=1, learning_rate=rate).grad_norm for rate in optimizer["learning_rates"]
    ]
    return {"grad_norms": norms, "weights": whole_tensors(named_parameters(policy), policy)}


def named_parameters(policy: Policy) -> dict[str, torch.Tensor]:
    return dict(policy.trainable.module.named_parameters())


def whole_tensors(named: Mapping[str, torch.Tensor], policy: Policy) -> dict[str, torch.Tensor]:
    """HF tensors put together from what every rank exports; each element must come exactly once."""
    mine = [
        (part.name, part.full_shape, part.start, part.tensor.clone())
        for part in export_slices(named, policy.architecture, policy.grid)
    ]
    whole: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    gathered: list[Any] = [None] * policy.grid.world_size
    dist.all_gather_object(gathered, mine, group=policy.grid.bytes_group)
    for name, shape, start, tensor in chain.from_iterable(gathered):
        box = Box(start, tuple(tensor.shape)).slices()
        whole.setdefault(name, torch.full(shape, torch.nan))[box] = tensor
        counts.setdefault(name, torch.zeros(shape))[box] += 1
    assert all(bool((count == 1).all()) for count in counts.values())
    return whole


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
