"""Sizes of a transformer policy, from the model group or a HF config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.sections import ModelConfig
from planner.errors import PlanError

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class Architecture:
    """Dense decoder with grouped-query attention and a gated MLP; widths in elements."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocab: int
    tied: bool
    max_positions: int

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: q, k, v, o, gate, up, down and its norms (biases are below 0.1 % and left out)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.key_value_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.embedding_parameters + self.layers * self.layer_parameters + self.hidden

    @property
    def key_value_elements_per_token(self) -> int:
        return 2 * self.layers * self.key_value_heads * self.head_dim


def from_model_config(model: ModelConfig) -> Architecture:
    """Raises PlanError when the model group leaves sizes open (they come from model_path/config.json then)."""
    sizes = {
        "num_hidden_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "vocab_size": model.vocab_size,
    }
    missing = [f"model.{name}" for name, value in sizes.items() if value == 0]
    if missing or not model.architecture:
        wanted = ", ".join(missing or ["model.architecture"])
        raise PlanError(
            f"the model's sizes are unknown: set model_path to a HF folder, or choose model=..., or set {wanted}"
        )
    return Architecture(
        name=model.architecture,
        layers=model.num_hidden_layers,
        hidden=model.hidden_size,
        intermediate=model.intermediate_size,
        heads=model.num_attention_heads,
        key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
        vocab=model.vocab_size,
        tied=model.tie_word_embeddings,
        max_positions=model.max_position_embeddings,
    )


def from_hf(config: Mapping[str, Any]) -> Architecture:
    """Sizes from a HF config.json. Raises PlanError for an architecture that the trainer does not know."""
    names = config.get("architectures") or ["(none)"]
    if names[0] not in SUPPORTED:
        raise PlanError(f"model_path holds {names[0]}; supported: {', '.join(SUPPORTED)}")
    heads = int(config["num_attention_heads"])
    return Architecture(
        name=names[0],
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config.get("max_position_embeddings", 0)),
    )
