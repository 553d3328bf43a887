"""What the tests of the rollout stage share: tiny random models, runs that serve them, and published versions."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional
import yaml
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from conf.schema import LibraConfig
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.rundir import RunDir
from stages.weights.manifest import Manifest, Probe
from stages.weights.publish import publish
from stages.weights.tensors import LocalTensor

VOCAB_SIZE = 64
MAX_MODEL_LEN = 256
PROBE_IDS = tuple(range(5, 29))
TOLERANCE = 1e-3


def tiny_model(seed: int, *, tied: bool = False) -> LlamaForCausalLM:
    """A random Llama of 0.1 million parameters whose distributions are far from uniform and differ by seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # vLLM's CPU attention has kernels for 32, 64, 80, ... only
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    return model


def save_model(model: LlamaForCausalLM, folder: Path) -> Path:
    """A complete HF folder: weights, config, tokenizer."""
    model.save_pretrained(folder)
    words = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3} | {f"w{index}": index for index in range(4, VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def logprobs_of(model: LlamaForCausalLM, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """log p(token i + 1 | tokens up to i) at `temperature`, one per token but the first, in nats."""
    logits = model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature
    scores = torch.nn.functional.log_softmax(logits, dim=-1)
    return scores[torch.arange(len(token_ids) - 1), torch.tensor(token_ids[1:])].tolist()


def cpu_config(model_path: Path) -> LibraConfig:
    config = LibraConfig(model_path=str(model_path), max_model_len=MAX_MODEL_LEN)
    config.hardware.device = "cpu"
    config.hardware.gpus_per_node = config.hardware.cpus_per_node = 2
    config.rollout.dtype = config.weights.dtype = "float32"
    config.rollout.enforce_eager = True
    config.rollout.kv_cache_bytes = 64e6
    config.rollout.max_num_seqs = 64
    config.rollout.heartbeat_interval_s = 0.1
    config.weights.proof_tolerance = TOLERANCE
    config.weights.refresh_timeout_s = 60.0
    config.phase_trace_enabled = False
    return config


def make_run(root: Path, config: LibraConfig, instances: tuple[str, ...] = ("rollout_000",)) -> RunDir:
    """A run directory as the launcher leaves it, seen by the trainer."""
    run = RunDir.create(root)
    run.config_yaml.write_text(yaml.safe_dump(OmegaConf.to_container(OmegaConf.structured(config))))
    run.token_file.touch(mode=0o600)
    run.token_file.write_text(secrets.token_hex(32))
    plan = Plan(
        layout="single",
        layout_reason="test",
        device="cpu",
        train=TrainLayout(1, 1, 1, 1, 1, 1, 1, 1),
        rollout=RolloutLayout(
            len(instances), 1, len(instances), tuple(InstancePlacement(name, 1, 0, 0) for name in instances)
        ),
    )
    run.write(run.plan_json, plan.to_dict())
    return replace(run, writer="trainer")


def published_tensors(model: LlamaForCausalLM) -> list[LocalTensor]:
    tensors = dict(model.named_parameters())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return [LocalTensor.whole(name, tensor.detach()) for name, tensor in tensors.items()]


def probe_of(model: LlamaForCausalLM) -> Probe:
    return Probe(PROBE_IDS, tuple(logprobs_of(model, list(PROBE_IDS))))


def publish_model(
    run: RunDir, version: int, model: LlamaForCausalLM, source: Path, probe: Probe | None = None
) -> Manifest:
    """`probe` other than what the model says makes a version that no engine can prove."""
    options = cpu_config(source).weights
    return publish(
        run,
        version=version,
        step=version,
        tensors=published_tensors(model),
        probe=probe or probe_of(model),
        source_folder=source,
        options=options,
    )
