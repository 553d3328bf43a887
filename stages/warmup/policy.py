"""An untrained policy of a configured shape, as transformers builds it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from conf.sections import ModelConfig
from stages.warmup.errors import WarmupError
from stages.warmup.vocabulary import BOS_ID, EOS_ID, PAD_ID

CONFIG_CLASSES: dict[str, Any] = {
    "LlamaForCausalLM": LlamaConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
}
INITIAL_STD = 0.05
DEFAULT_ROPE_THETA = 10000.0
NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def make_policy(model: ModelConfig, *, vocabulary: int, seed: int) -> Any:
    """A float32 model with random weights. Raises WarmupError when the shape is incomplete or too small.

    `model.vocab_size` 0 takes the size of the tokenizer; rows beyond the tokenizer's stay untrained.
    """
    config_class = CONFIG_CLASSES.get(model.architecture)
    if config_class is None:
        raise WarmupError(
            f"model.architecture is {model.architecture!r}; a policy can be made of {', '.join(CONFIG_CLASSES)}"
        )
    unset = [f"model.{name}" for name in (*NEEDED, "max_position_embeddings") if not getattr(model, name)]
    if unset:
        raise WarmupError(f"{', '.join(unset)} must be set: there is no model folder to read them from")
    if model.vocab_size and model.vocab_size < vocabulary:
        raise WarmupError(
            f"model.vocab_size is {model.vocab_size}, the tokenizer has {vocabulary} tokens; set it to 0 or more"
        )
    config = config_class(
        **{name: getattr(model, name) for name in NEEDED},
        head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
        vocab_size=model.vocab_size or vocabulary,
        max_position_embeddings=model.max_position_embeddings,
        rope_theta=DEFAULT_ROPE_THETA if model.rope_theta is None else model.rope_theta,
        tie_word_embeddings=bool(model.tie_word_embeddings),
        initializer_range=INITIAL_STD,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    policy.generation_config.eos_token_id = EOS_ID
    return policy
