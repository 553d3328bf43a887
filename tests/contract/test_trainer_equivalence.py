"""The trainer computes what a plain transformers + PyTorch program computes, in every layout of ranks.

The reference below is written for one sequence at a time, without padding, chunks or parallelism, and shares no code
with the trainer. Four processes run all layouts once; the tests compare what they saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from conf.schema import LibraConfig
from conf.sections import AlgorithmConfig, HardwareConfig
from planner.plan import Plan, RolloutLayout, TrainLayout
from stages.batches import Batch, Sequence, write_batch
from stages.rundir import RunDir

VOCAB = 51  # odd, so that two ranks need a padded embedding
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2_untied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3_tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
}
TRAINED = ("llama", "qwen2", "qwen3")
LAYOUTS = {"tp1_dp1": (1, 1), "tp2_dp1": (2, 1), "tp1_dp2": (1, 2), "tp2_dp2": (2, 2)}
TEMPERATURE = 0.7
ALGORITHM = AlgorithmConfig(
    clip_low=0.1, clip_high=0.15, behaviour_weight_cap=1.1, kl_coef=0.05, clip_grad_norm=0.0, adam_eps=1e-3
)
CLIP_GRAD_NORM, WEIGHT_DECAY, LEARNING_RATES = 0.05, 0.1, (1e-3, 5e-4)  # of the optimizer test
GRADIENT_CASES = {
    "tp2_dp2": [(4, True)]
}  # layout -> (micro-batch size, recompute_logprobs); four ranks share two cores
ALL_GRADIENT_CASES = [(1, True), (4, True), (4, False)]


def models_of(layout: str) -> tuple[str, ...]:
    return ("qwen2", "qwen3") if layout == "tp2_dp2" else tuple(MODELS)


LOADED = [(layout, model) for layout in LAYOUTS for model in models_of(layout)]
TRAINED_CASES = [(layout, model) for layout, model in LOADED if model in TRAINED]
UPDATED = [
    (layout, model, micro_batch_size, recompute)
    for layout, model in TRAINED_CASES
    for micro_batch_size, recompute in GRADIENT_CASES.get(layout, ALL_GRADIENT_CASES)
]


# ---- what the trainer ranks are given and give back ------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, run directories and the results of all ranks."""
    root = tmp_path_factory.mktemp("trainer")
    torch.manual_seed(0)
    for name, build in MODELS.items():
        model = build()
        with torch.no_grad():  # norms and biases of a new model are all ones and zeros: any mix-up would pass
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(root / "models" / name, max_shard_size="20KB" if name == "qwen3" else "1GB")
    layouts = [
        {
            "name": name,
            "tp": tp,
            "dp": dp,
            "models": models_of(name),
            "trained": TRAINED,
            "gradients": GRADIENT_CASES.get(name, ALL_GRADIENT_CASES),
        }
        for name, (tp, dp) in LAYOUTS.items()
    ]
    optimizer = {"clip_grad_norm": CLIP_GRAD_NORM, "weight_decay": WEIGHT_DECAY, "learning_rates": LEARNING_RATES}
    (root / "work.json").write_text(json.dumps({"layouts": layouts, "optimizer": optimizer}))
    for name, (tp, dp) in LAYOUTS.items():
        make_run(root / "runs" / name, tp, dp)
        (root / "results" / name).mkdir(parents=True)
    run_ranks(root, max(tp * dp for tp, dp in LAYOUTS.values()))
    return root


def make_run(path: Path, tp: int, dp: int) -> None:
    run = RunDir.create(path)
    config = LibraConfig(
        train_gpus=tp * dp,
        train_tp_size=tp,
        train_dtype="float32",
        temperature=TEMPERATURE,
        algorithm=ALGORITHM,
        hardware=HardwareConfig(device="cpu"),
    )
    OmegaConf.save(OmegaConf.create(asdict(config)), run.config_yaml)
    train = TrainLayout(tp * dp, 1, tp * dp, tp, 1, 1, dp, 1)
    plan = Plan("hetjob", "test", "cpu", train, RolloutLayout(1, 1, 1, ()))
    run.write(run.plan_json, plan.to_dict())
    write_batch(run, 1, example_batch())


def run_ranks(root: Path, ranks: int) -> None:
    worker = Path(__file__).with_name("trainer_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(root), str(ranks)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def results(folder: Path, layout: str, model: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "results" / layout / f"{model}.pt", weights_only=True)
    return loaded


@cache
def example_batch() -> Batch:
    """Seven sequences of 2 to 12 tokens from versions 0 and 1; one has tokens of a second turn's prompt inside.

    Two have no advantage: without a KL term the trainer counts their tokens and leaves their computation out.
    """
    rng = np.random.default_rng(7)
    rows = []
    for group, (prompt, response) in enumerate([(1, 1), (2, 9), (4, 3), (1, 11), (3, 5), (2, 2), (5, 4)]):
        n = prompt + response
        mask = np.array([0] * prompt + [1] * response)
        if group == 1:
            mask[5:7] = 0
        rows.append(
            Sequence(
                token_ids=rng.integers(0, VOCAB, n),
                loss_mask=mask,
                behaviour_logprobs=np.where(mask, rng.uniform(-9, -3, n), 0.0),
                versions=np.where(mask, rng.integers(0, 2, n), -1),
                reward=0.0,
                advantage=0.0 if group in (2, 5) else float(rng.normal()),
                group_id=group,
            )
        )
    return Batch.pack(rows)


# ---- the reference ---------------------------------------------------------------------------------------------------


def reference_model(path: Path) -> PreTrainedModel:
    """In float64, so that what differs is the trainer's own rounding."""
    classes = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
    return classes[path.name.split("_")[0]].from_pretrained(path, dtype=torch.float64)


def reference_logprobs(model: PreTrainedModel, ids: list[int], temperature: float) -> torch.Tensor:
    """log p of tokens 1 .. n - 1 of one sequence."""
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def reference_loss(model: PreTrainedModel, batch: Batch, recompute: bool) -> torch.Tensor:
    """Decoupled PPO, token by token, straight from the formula."""
    total = torch.zeros((), dtype=torch.float64)
    for s in range(batch.num_sequences):
        start, end = batch.cu_seqlens[s], batch.cu_seqlens[s + 1]
        current = reference_logprobs(model, batch.token_ids[start:end].tolist(), TEMPERATURE)
        advantage = float(batch.advantages[s])
        for i in range(start + 1, end):
            if not batch.loss_mask[i]:
                continue
            logp, behaviour = current[i - start - 1], float(batch.behaviour_logprobs[i])
            proximal = logp.item() if recompute else behaviour
            weight = min(float(np.exp(proximal - behaviour)), 1.1)
            ratio = torch.exp(logp - proximal)
            clipped = torch.clamp(ratio, 0.9, 1.15)
            gain = weight * torch.min(ratio * advantage, clipped * advantage)
            difference = proximal - logp
            kl = torch.exp(difference) - difference - 1
            total = total - gain + 0.05 * kl
    return total / float(batch.loss_mask.sum())


@cache
def reference_gradients(path: Path, recompute: bool) -> tuple[float, dict[str, torch.Tensor]]:
    model = reference_model(path)
    loss = reference_loss(model, example_batch(), recompute)
    loss.backward()
    return loss.item(), gradients_of(model)


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@cache
def reference_steps(path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms and final weights of two clipped steps of torch's own AdamW; norms and biases do not decay."""
    model = reference_model(path)
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    betas = (ALGORITHM.adam_beta1, ALGORITHM.adam_beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=ALGORITHM.adam_eps)
    norms = []
    for rate in LEARNING_RATES:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        reference_loss(model, example_batch(), recompute=False).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM).item())
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_close(computed: torch.Tensor, expected: torch.Tensor, share: float, name: str) -> None:
    """No element differs by more than `share` of the largest element."""
    difference = (computed.double() - expected).abs().max().item()
    assert difference <= share * expected.abs().max().item(), f"{name} differs by {difference}"


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout, model", LOADED)
def test_weights_survive_the_way_in_and_out_bit_for_bit(folder: Path, layout: str, model: str) -> None:
    exported = results(folder, layout, model)["exported"]

    stored: dict[str, torch.Tensor] = {}
    for file in (folder / "models" / model).glob("*.safetensors"):
        stored |= load_file(file)
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


@pytest.mark.parametrize("layout, model", LOADED)
def test_logprobs_of_a_padded_batch_equal_those_of_single_sequences(folder: Path, layout: str, model: str) -> None:
    batch, reference = example_batch(), reference_model(folder / "models" / model)

    computed = results(folder, layout, model)["logprobs"]

    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    with torch.no_grad():
        for start, end in pairwise(batch.cu_seqlens):
            expected[start + 1 : end] = reference_logprobs(reference, batch.token_ids[start:end].tolist(), TEMPERATURE)
    expected *= torch.from_numpy(batch.loss_mask)
    torch.testing.assert_close(computed.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout, model", LOADED)
def test_probe_logprobs_are_taken_at_temperature_one(folder: Path, layout: str, model: str) -> None:
    computed = results(folder, layout, model)["probe"]

    with torch.no_grad():
        expected = reference_logprobs(reference_model(folder / "models" / model), [3, 1, 4, 1, 5, 9, 2, 6], 1.0)
    assert computed == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.exercises("recompute_logprobs", "train_tp_size", "micro_batch_size")
@pytest.mark.parametrize("layout, model, micro_batch_size, recompute", UPDATED)
def test_loss_and_gradient_equal_the_plain_implementation(
    folder: Path, layout: str, model: str, micro_batch_size: int, recompute: bool
) -> None:
    computed = results(folder, layout, model)[f"micro_batch_{micro_batch_size}_recompute_{recompute}"]

    loss, expected = reference_gradients(folder / "models" / model, recompute)
    assert computed["result"]["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert computed["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(computed["gradients"][name], gradient, 1e-5, name)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    assert computed["result"]["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("layout, model", TRAINED_CASES)
def test_two_optimizer_steps_equal_those_of_torch(folder: Path, layout: str, model: str) -> None:
    computed = results(folder, layout, model)["optimizer"]

    norms, expected = reference_steps(folder / "models" / model)
    assert computed["grad_norms"] == pytest.approx(norms, rel=1e-4)
    for name, weight in expected.items():
        torch.testing.assert_close(computed["weights"][name].double(), weight, rtol=0, atol=2e-7)
