"""Trainer ranks that take the same steps with the optimizer in different memories: `python offload_worker.py ROOT`.

ROOT/work.json says what: {"device", "ranks", "cases": [options of the run, ...], "learning_rates"}. Results are saved as
ROOT/results.pt, a list in the order of the cases. On the CPU a pretended GPU lets megatron-core believe in two memories.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conf.schema import LibraConfig
from stages.batches import Batch, read_batch
from stages.context import open_context
from stages.trainer.hf_weights import export_shards
from stages.trainer.parallel import RankGrid, connected
from stages.trainer.policy import Policy
from tests.fake_gpu import FakeGpu, install_streams


def main(root: Path) -> int:
    work = json.loads((root / "work.json").read_text())
    # Forking spares the imports, which take longer than the work, but not where a parent may have touched CUDA.
    context: Any = multiprocessing.get_context("fork" if work["device"] == "cpu" else "spawn")
    processes = [context.Process(target=run_rank, args=(root, work, rank)) for rank in range(work["ranks"])]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        processes[0].join(0.2)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
    return int(any(process.exitcode != 0 for process in processes))


def run_rank(root: Path, work: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    gpu = None
    if work["device"] == "cpu":
        install_streams()
        gpu = FakeGpu()
    place = {"rank": rank, "world_size": work["ranks"], "local_rank": rank}
    with open_context("trainer", root / "run", name="trainer", **place) as context:
        found = read_batch(context.run, 0)
        assert found is not None
        results = []
        with connected(context, tp=1) as grid, gpu or nullcontext():
            for case in work["cases"]:
                config = replace(context.config, **case)
                results.append(steps(root / "model", config, grid, found[0], work["learning_rates"], gpu))
                gc.collect()
        if rank == 0:
            torch.save(results, root / "results.pt")


def steps(
    model: Path, config: LibraConfig, grid: RankGrid, batch: Batch, learning_rates: list[float], gpu: FakeGpu | None
) -> dict[str, Any]:
    """Losses, norms, whole float32 weights, where state and masters are, and bytes on the GPU."""
    on_gpu = grid.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    pinned_before = 0 if gpu is None else gpu.pinned_bytes
    policy = Policy.load(model, config, grid)
    pinned_built = 0 if gpu is None else gpu.pinned_bytes - pinned_before
    taken = [policy.update(batch, None, version=0, learning_rate=rate) for rate in learning_rates]
    grid.synchronize()
    inner = policy.trainable.optimizer.chained_optimizers[0].optimizer
    return {
        "losses": [result.loss for result in taken],
        "norms": [result.grad_norm for result in taken],
        "weights": whole_weights(policy),
        "state": state(inner),
        "pinned_built_bytes": pinned_built,
        "held_bytes": torch.cuda.memory_allocated() if on_gpu else 0,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }


def state(inner: Any) -> dict[str, Any]:
    """Elements of this rank's optimizer in each memory, and the options of its last step."""
    optimizers = [inner] if isinstance(inner, torch.optim.AdamW) else inner.sub_optimizers
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    offloaded = getattr(inner, "cpu_copys_map_gpu_param", {})
    moments = {parameter: values for optimizer in optimizers for parameter, values in optimizer.state.items()}
    return {
        "elements": sum(parameter.numel() for parameter in moments),
        "offloaded": sum(parameter.numel() for parameter in offloaded),
        "offloaded_moments": sum(moments[parameter]["exp_avg"].numel() for parameter in offloaded),
        "pinned": all(parameter.is_pinned() for parameter in offloaded),
        "dtypes": sorted({str(parameter.dtype) for parameter in moments}),
        "learning_rates": sorted({group["lr"] for group in groups}),
        "weight_decays": sorted({group["weight_decay"] for group in groups}),
    }


def whole_weights(policy: Policy) -> dict[str, torch.Tensor]:
    """HF tensors put together from the ranks' shares."""
    shards = export_shards(policy.trainable.module, policy.architecture, policy.grid)
    mine = [(part.name, part.tensor.float().cpu().clone()) for part in shards]
    gathered: list[Any] = [None] * policy.grid.world_size
    dist.all_gather_object(gathered, mine, group=policy.grid.bytes_group)
    return dict(chain.from_iterable(gathered))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
