"""Seconds to save and load a checkpoint on this machine, beside torch.save and torch.load of the same tensors.

    python -m benchmarks.checkpoint                                     # the demo's policy, and a state of about 500 MB
    python -m benchmarks.checkpoint --parameters 1.5e9 --dtype bfloat16 --device cuda --offload none 0.5 1
    python -m benchmarks.checkpoint --folder /lustre/me --repeat 5      # another filesystem

One rank with random weights and one optimizer step behind it. Save and load are the trainer's own: digests, fsync, manifest and
rename on the one side; sizes, digests and copies into the optimizer on the other. torch.save is followed by fsync too.
What is read was written just before, so reading measures memory rather than the disk. Medians over --repeat, one JSON line each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from conf.schema import LibraConfig
from planner.plan import Plan, RolloutLayout, TrainLayout
from stages.batches import Batch, write_batch
from stages.checkpoint.load import steps_to_try
from stages.context import open_context
from stages.rundir import RunDir
from stages.trainer.checkpoints import Checkpoints
from stages.trainer.parallel import TrainerRanks, connected
from stages.trainer.policy import Policy
from stages.trainer.state import state_to_save

DEMO = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 384, "head_dim": 32, "num_attention_heads": 4}
"""The shape in conf/model/demo.yaml."""
SEQUENCES, TOKENS, PROMPT_TOKENS, VOCAB = 4, 32, 8, 32
LAYER_PARAMETERS = 12
"""Parameters of a layer of the made-up shape, in units of hidden_size squared."""


def main() -> int:
    options = parse()
    sizes = [options.parameters] if options.parameters else [0.0, 500e6 / 12]
    for parameters in sizes:
        for offload in options.offload:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                print(json.dumps(measure(Path(folder), parameters, offload, options)), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parameters", type=float, default=0.0, help="of the model (default: the demo's, then 42 million)"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--offload",
        nargs="+",
        default=[None],
        type=lambda text: None if text == "none" else float(text),
        help="none, or the fraction of optimizer state in host memory (cuda)",
    )
    parser.add_argument("--folder", help="where to write (default: the folder for temporary files)")
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


def measure(folder: Path, parameters: float, offload: float | None, options: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of all four, and the size of a checkpoint."""
    make_model(folder / "model", parameters)
    run = make_run(folder, offload, options)
    with open_context("trainer", run.root, name="trainer") as context, connected(context, tp=1) as grid:
        policy = Policy.load(folder / "model", context.config, grid)
        policy.update(random_batch(), None, version=0, learning_rate=1e-3)
        checkpoints, path = Checkpoints(context, policy, grid), folder / "state.pt"
        actions: dict[str, Callable[[int], object]] = {
            "save_s": checkpoints.save,
            "torch_save_s": lambda _step: torch_save(state_to_save(policy.trainable), path),
            "load_s": lambda _step: checkpoints.resume(steps_to_try(run, TrainerRanks(grid))),
            "torch_load_s": lambda _step: torch.load(path, weights_only=True),
        }
        with redirect_stdout(sys.stderr):
            seconds = in_turn(actions, options.repeat, path)
        num_bytes = sum(file.stat().st_size for file in run.checkpoint(options.repeat).iterdir())
        count = sum(parameter.numel() for parameter in policy.trainable.module.parameters())
    return {
        "parameters": count,
        "device": options.device,
        "dtype": options.dtype,
        "offload": offload,
        "bytes": num_bytes,
        **{name: round(median(found), 4) for name, found in seconds.items()},
    }


def in_turn(actions: dict[str, Callable[[int], object]], repeat: int, path: Path) -> dict[str, list[float]]:
    """Seconds of every action, all of them in each round: whatever else the machine does meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for step in range(1, repeat + 1):
        path.unlink(missing_ok=True)  # every save writes a new file
        for name, action in actions.items():
            gc.collect()
            started_s = time.monotonic()
            action(step)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.monotonic() - started_s)
    return seconds


def torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with open(path, "wb") as file:
        # Of a view torch.save writes all that lies behind it: the whole parameter buffer for each parameter.
        torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def make_model(folder: Path, parameters: float) -> None:
    """The demo's shape for 0, else layers of the width that gives about `parameters`."""
    shape: dict[str, Any] = DEMO
    if parameters:
        hidden = 64 * max(1, round((parameters / (LAYER_PARAMETERS * 8)) ** 0.5 / 64))
        layers = max(1, round(parameters / (LAYER_PARAMETERS * hidden**2)))
        heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
        shape = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": hidden * 8 // 3, **heads}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)


def make_run(folder: Path, offload: float | None, options: argparse.Namespace) -> RunDir:
    run = RunDir.create(folder / "run")
    config = LibraConfig(model_path=str(folder / "model"), train_dtype=options.dtype, save_interval=1)
    config.hardware.device = options.device
    config.keep_latest_checkpoints = 1
    if offload is not None:
        config.megatron_optimizer_cpu_offload, config.megatron_optimizer_offload_fraction = True, offload
    OmegaConf.save(OmegaConf.create(asdict(config)), run.config_yaml)
    plan = Plan("single", "benchmark", options.device, TrainLayout(1, 1, 1, 1, 1, 1, 1, 4), RolloutLayout(1, 1, 1, ()))
    run.write(run.plan_json, plan.to_dict())
    write_batch(run, 0, random_batch())
    return run


def random_batch() -> Batch:
    rng = np.random.default_rng(0)
    count = SEQUENCES * TOKENS
    generated = np.arange(count) % TOKENS >= PROMPT_TOKENS
    return Batch(
        token_ids=rng.integers(0, VOCAB, count).astype(np.int32),
        loss_mask=generated.astype(np.uint8),
        behaviour_logprobs=np.where(generated, -4.0, 0.0).astype(np.float32),
        versions=np.where(generated, 0, -1).astype(np.int32),
        cu_seqlens=np.arange(0, count + 1, TOKENS, dtype=np.int32),
        rewards=np.ones(SEQUENCES, np.float32),
        advantages=rng.normal(size=SEQUENCES).astype(np.float32),
        group_ids=np.zeros(SEQUENCES, np.int32),
    )


if __name__ == "__main__":
    sys.exit(main())
