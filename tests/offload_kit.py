"""The same few steps of a small model with the optimizer in different memories: what they are given and how they compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from conf.schema import LibraConfig
from conf.sections import AlgorithmConfig, HardwareConfig
from planner.plan import Plan, RolloutLayout, TrainLayout
from stages.batches import Batch, write_batch
from stages.rundir import RunDir

PROJECT = Path(__file__).parents[1]
VOCAB, SEQUENCES, TOKENS, PROMPT_TOKENS = 97, 8, 24, 4
LEARNING_RATES = [1e-2, 5e-3, 2e-3]
WEIGHT_DECAY = 0.1
FRACTIONS = (0.0, 0.5, 1.0)


def cases(dtype: str, **more: Any) -> list[dict[str, Any]]:
    """Options without offload first, then with every fraction."""
    offloads: list[dict[str, Any]] = [{"megatron_optimizer_cpu_offload": False}]
    offloads += [
        {"megatron_optimizer_cpu_offload": True, "megatron_optimizer_offload_fraction": fraction}
        for fraction in FRACTIONS
    ]
    return [{"train_dtype": dtype, **offload, **more} for offload in offloads]


def run_cases(
    root: Path,
    device: str,
    ranks: int,
    wanted: list[dict[str, Any]],
    hidden: int = 32,
    learning_rates: Sequence[float] = LEARNING_RATES,
) -> list[Any]:
    """What every case gave, in a process of its own."""
    make_model(root / "model", hidden)
    make_run(root / "run", device, ranks)
    work = {"device": device, "ranks": ranks, "cases": wanted, "learning_rates": list(learning_rates)}
    (root / "work.json").write_text(json.dumps(work))
    done = subprocess.run(
        [sys.executable, "-m", "tests.offload_worker", str(root)],
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results: list[Any] = torch.load(root / "results.pt", weights_only=True)
    return results


def make_model(folder: Path, hidden: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_run(path: Path, device: str, ranks: int) -> None:
    run = RunDir.create(path)
    config = LibraConfig(
        train_gpus=ranks,
        micro_batch_size=4,
        algorithm=AlgorithmConfig(adam_eps=1e-4, weight_decay=WEIGHT_DECAY, clip_grad_norm=0.05),
        hardware=HardwareConfig(device=device),
    )
    OmegaConf.save(OmegaConf.create(asdict(config)), run.config_yaml)
    train = TrainLayout(ranks, 1, ranks, 1, 1, 1, ranks, 4)
    run.write(run.plan_json, Plan("hetjob", "test", device, train, RolloutLayout(1, 1, 1, ())).to_dict())
    write_batch(run, 0, random_batch())


def random_batch() -> Batch:
    rng = np.random.default_rng(3)
    count = SEQUENCES * TOKENS
    generated = np.arange(count) % TOKENS >= PROMPT_TOKENS
    return Batch(
        token_ids=rng.integers(0, VOCAB, count).astype(np.int32),
        loss_mask=generated.astype(np.uint8),
        behaviour_logprobs=np.where(generated, rng.uniform(-6, -3, count), 0.0).astype(np.float32),
        versions=np.where(generated, 0, -1).astype(np.int32),
        cu_seqlens=np.arange(0, count + 1, TOKENS, dtype=np.int32),
        rewards=np.ones(SEQUENCES, np.float32),
        advantages=rng.normal(size=SEQUENCES).astype(np.float32),
        group_ids=(np.arange(SEQUENCES) // 2).astype(np.int32),
    )


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Over all elements of all weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
