"""What the tests of checkpoints share: a small model, and run directories with recorded batches to train on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from conf.schema import LibraConfig
from conf.sections import AlgorithmConfig, HardwareConfig, WeightsConfig
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.batches import Batch, write_batch
from stages.rundir import RunDir

PROJECT = Path(__file__).parents[1]
MODEL = "model"
TOTAL_STEPS, SAVED_AT = 4, 2
VOCAB = 51  # odd, so that two tensor-parallel ranks need a padded embedding
SEQUENCES, TOKENS, PROMPT_TOKENS = 6, 12, 3
INSTANCE = "rollout_000"


@dataclass(frozen=True)
class Case:
    """One way to train; `offload` is the fraction of the optimizer in host memory, None for no offload.

    `resumed_offload` is that after the resume, where `changes` says that it is another.
    """

    tp: int
    dp: int
    dtype: str
    offload: float | None = None
    device: str = "cpu"
    changes: bool = False
    resumed_offload: float | None = None

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def name(self) -> str:
        words = [f"tp{self.tp}", f"dp{self.dp}", self.dtype]
        words += [] if self.offload is None else [f"offload{self.offload:g}"]
        words += ["then", f"offload{self.resumed_offload}"] if self.changes else []
        return "_".join(words)

    @property
    def options(self) -> dict[str, Any]:
        return offload_options(self.offload)

    @property
    def resumed_options(self) -> dict[str, Any]:
        return offload_options(self.resumed_offload if self.changes else self.offload)


def offload_options(fraction: float | None) -> dict[str, Any]:
    return {
        "megatron_optimizer_cpu_offload": fraction is not None,
        "megatron_optimizer_offload_fraction": fraction or 0.0,
    }


def run_cases(root: Path, cases: list[Case]) -> dict[tuple[Case, int], dict[str, Any]]:
    """What tests/checkpoint_worker.py found, in a process of its own, for every rank of every case."""
    make_model(root / MODEL)
    for case in cases:
        add_batches(make_run(root, case))
    (root / "work.json").write_text(json.dumps([asdict(case) for case in cases]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint_worker", str(root)],
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    places = [(case, rank) for case in cases for rank in range(case.ranks)]
    return {(case, rank): json.loads((root / f"{case.name}.{rank}.json").read_text()) for case, rank in places}


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_run(root: Path, case: Case, name: str = "", **options: Any) -> RunDir:
    """ROOT/NAME as a launcher leaves it, for one rollout instance; the model is ROOT/model."""
    run = RunDir.create(root / (name or case.name))
    settings: dict[str, Any] = {
        "model_path": str(root / MODEL),
        "train_gpus": case.ranks,
        "train_tp_size": case.tp,
        "train_dtype": case.dtype,
        "total_steps": TOTAL_STEPS,
        "save_interval": SAVED_AT,
        "learning_rate": 1e-2,
        "micro_batch_size": 4,
        "max_model_len": 64,
        "algorithm": AlgorithmConfig(lr_schedule="cosine", weight_decay=0.1, clip_grad_norm=0.5),
        "weights": WeightsConfig(dtype="float32", proof_tolerance=1e-3),
        "hardware": HardwareConfig(device=case.device),
        **case.options,
        **options,
    }
    OmegaConf.save(OmegaConf.create(asdict(LibraConfig(**settings))), run.config_yaml)
    train = TrainLayout(case.ranks, 1, case.ranks, case.tp, 1, 1, case.dp, 4)
    rollout = RolloutLayout(1, 1, 1, (InstancePlacement(INSTANCE, 1, 1, 0),))
    run.write(run.plan_json, Plan("hetjob", "test", case.device, train, rollout).to_dict())
    return run


def add_batches(run: RunDir, steps: int = TOTAL_STEPS) -> None:
    for step in range(steps):
        write_batch(run, step, random_batch(step))


def random_batch(step: int) -> Batch:
    """Sequences of version `step` with made-up log-probs and advantages, the same for every caller."""
    rng = np.random.default_rng(step)
    count = SEQUENCES * TOKENS
    generated = np.arange(count) % TOKENS >= PROMPT_TOKENS
    return Batch(
        token_ids=rng.integers(0, VOCAB, count).astype(np.int32),
        loss_mask=generated.astype(np.uint8),
        behaviour_logprobs=np.where(generated, rng.uniform(-5, -3, count), 0.0).astype(np.float32),
        versions=np.where(generated, step, -1).astype(np.int32),
        cu_seqlens=np.arange(0, count + 1, TOKENS, dtype=np.int32),
        rewards=np.ones(SEQUENCES, np.float32),
        advantages=rng.normal(size=SEQUENCES).astype(np.float32),
        group_ids=(np.arange(SEQUENCES) // 2).astype(np.int32),
    )
