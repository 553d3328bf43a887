"""The trainer alone, in several layouts on the same batch: seconds, tokens/s, memory, and that the results agree.

    python -m benchmarks.trainer RUN --step 199 --layouts 1x1 2x1 1x2            # a recorded batch of a run
    python -m benchmarks.trainer --made-up --layouts 1x1 2x1 --dtype bfloat16       # random 1.5B Qwen2, 16 x 2,048 tokens
    python -m benchmarks.trainer --made-up --dtype bfloat16 --offload none 0.5 1    # with optimizer state in host memory

A layout is TPxDP; its ranks are processes of this machine, on the device that the run was planned for (--made-up: cuda).
Times are of the last of --repeat steps, so that kernels are loaded and memory is allocated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from conf.load import load
from conf.schema import LibraConfig
from planner.plan import Plan, RolloutLayout, TrainLayout
from stages.batches import Batch, read_batch, write_batch
from stages.context import StageContext, open_context
from stages.rundir import RunDir
from stages.trainer.parallel import connected
from stages.trainer.policy import Policy

ANSWER_TIMEOUT_S = 300.0
SEQUENCES, TOKENS, PROMPT_TOKENS, VOCAB = 16, 2048, 256, 151936
MADE_UP = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
}
"""The shape of Qwen2.5-1.5B."""

SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {},
    "7b_8_layers": {
        "num_hidden_layers": 8,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""What --shape changes of MADE_UP: layers as wide as those of Qwen2.5-7B, few enough for one GPU and its optimizer."""


@dataclass(frozen=True)
class Job:
    run_dir: Path
    model: Path
    step: int
    tp: int
    dp: int
    dtype: str
    micro_batch_size: int
    repeat: int
    offload: float | None


def main() -> int:
    options = parse()
    with scratch_run(options.run, options.device) as run:
        if options.made_up:
            model, options.step = run.root / "model", 0
            make_up(run, model, MADE_UP | SHAPES[options.shape])
        else:
            model = options.model or run.weights_version(options.step)
        for layout, offload in product(options.layouts, options.offload):
            tp, dp = (int(size) for size in layout.split("x"))
            job = Job(
                run.root, model, options.step, tp, dp, options.dtype, options.micro_batch_size, options.repeat, offload
            )
            print(json.dumps(measure(job)), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="a run directory; it is read, not changed")
    parser.add_argument("--step", type=int, default=0, help="recorded batch and, without --model, weights version")
    parser.add_argument("--model", type=Path, help="HF folder (default: the run's weights of --step)")
    parser.add_argument("--made-up", action="store_true", help="random model and batch")
    parser.add_argument("--shape", default="1.5b", choices=tuple(SHAPES), help="of the model that --made-up makes")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the one that the run was planned for")
    parser.add_argument("--layouts", nargs="+", default=["1x1"], help="TPxDP")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--offload",
        nargs="+",
        type=fraction,
        default=[None],
        help="none, or the fraction of optimizer state in host memory",
    )
    options = parser.parse_args()
    if options.run is None and not options.made_up:
        parser.error("RUN is needed without --made-up")
    return options


def fraction(text: str) -> float | None:
    return None if text == "none" else float(text)


@contextmanager
def scratch_run(source: Path | None, device: str | None) -> Iterator[RunDir]:
    """A run directory of its own with the plan, options, batches and weights of `source`; without one, with defaults."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder) / "run")
        if source is None:
            layouts = TrainLayout(1, 1, 8, 1, 1, 1, 1, 1), RolloutLayout(1, 1, 1, ())
            config, plan = LibraConfig(), Plan("hetjob", "made up", "cuda", *layouts).to_dict()
        else:
            given = RunDir.open(source, writer="benchmark")
            config, plan = load(given.config_yaml), given.read(given.plan_json, any_attempt=True) or {}
            copy_results(given, run)
        if device is not None:
            config.hardware.device = plan["device"] = device
        OmegaConf.save(OmegaConf.create(asdict(config)), run.config_yaml)
        run.write(run.plan_json, plan)
        yield run


def copy_results(given: RunDir, run: RunDir) -> None:
    for step in given.published_batches()[-3:]:
        found = read_batch(given, step)
        if found is not None:
            write_batch(run, step, found[0])
    for version in given.published_versions():
        run.weights_version(version).symlink_to(given.weights_version(version))


def make_up(run: RunDir, folder: Path, shape: dict[str, Any]) -> None:
    """A random model of `shape` (a config.json) and a batch of SEQUENCES x TOKENS random tokens as batch 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(shape))
    count = SEQUENCES * TOKENS
    mask = (np.arange(count) % TOKENS >= PROMPT_TOKENS).astype(np.uint8)
    batch = Batch(
        token_ids=np.random.default_rng(0).integers(0, VOCAB, count).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask == 1, -12.0, 0.0).astype(np.float32),
        versions=np.where(mask == 1, 0, -1).astype(np.int32),
        cu_seqlens=np.arange(0, count + 1, TOKENS, dtype=np.int32),
        rewards=np.ones(SEQUENCES, np.float32),
        advantages=np.tile(np.array([1.0, -1.0], np.float32), SEQUENCES // 2),
        group_ids=(np.arange(SEQUENCES) // 4).astype(np.int32),
    )
    write_batch(run, 0, batch)


def measure(job: Job) -> dict[str, Any]:
    """Start the ranks of one layout; what rank 0 saw. Raises queue.Empty when they do not answer in time."""
    context = multiprocessing.get_context("spawn")
    answers: Queue[dict[str, Any]] = context.Queue()  # type: ignore[assignment]
    ranks = [context.Process(target=run_rank, args=(job, rank, answers)) for rank in range(job.tp * job.dp)]
    for process in ranks:
        process.start()
    try:
        return answers.get(timeout=ANSWER_TIMEOUT_S)
    finally:
        for process in ranks:
            process.join(30)
            process.kill()
        (job.run_dir / "attempts" / "0" / "rendezvous.json").unlink(missing_ok=True)


def run_rank(job: Job, rank: int, answers: Queue[dict[str, Any]]) -> None:
    size = job.tp * job.dp
    with open_context("trainer", job.run_dir, name="trainer", rank=rank, world_size=size, local_rank=rank) as context:
        context.config = replace(
            context.config,
            train_dtype=job.dtype,
            micro_batch_size=job.micro_batch_size,
            recompute_micro_batch_size=job.micro_batch_size,
            megatron_optimizer_cpu_offload=job.offload is not None,
            megatron_optimizer_offload_fraction=job.offload or 0.0,
        )
        with connected(context, tp=job.tp) as grid:
            policy = Policy.load(job.model, context.config, grid)
            result = steps(job, context, policy)
            if grid.is_first:
                answers.put(result)


def steps(job: Job, context: StageContext, policy: Policy) -> dict[str, Any]:
    found = read_batch(context.run, job.step)
    assert found is not None
    batch, first, seconds = found[0], None, (0.0, 0.0)
    for _ in range(job.repeat):
        marks = [now(policy)]
        proximal = policy.recompute_logprobs(batch)
        marks.append(now(policy))
        result = policy.update(batch, proximal, version=job.step, learning_rate=1e-6)
        marks.append(now(policy))
        first, seconds = first or result, (marks[1] - marks[0], marks[2] - marks[1])
    assert first is not None
    on_gpu = policy.grid.device.type == "cuda"
    held_bytes, peak_bytes = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) if on_gpu else (0, 0)
    return {
        "layout": f"tp{job.tp} dp{job.dp}",
        "device": policy.grid.device.type,
        "dtype": job.dtype,
        "offload": job.offload,
        "recompute_s": round(seconds[0], 3),
        "update_s": round(seconds[1], 3),
        "update_tokens_per_s": round(batch.num_tokens / seconds[1]),
        "held_gb": round(held_bytes / 1e9, 2),
        "peak_gb": round(peak_bytes / 1e9, 2),
        "loss": first.loss,
        "grad_norm": first.grad_norm,
        "last_grad_norm": result.grad_norm,
    }


def now(policy: Policy) -> float:
    policy.grid.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
