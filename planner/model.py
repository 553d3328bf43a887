"""Which architecture a configuration means: that of model_path/config.json, or of the model group where there is no folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conf.sections import ModelConfig
from planner.architecture import MIXTURE_OF_EXPERTS, SUPPORTED, Architecture
from planner.errors import PlanError
from planner.hf_config import HfConfig

DEFAULT_ROPE_THETA = 10000.0
QWEN3_HEAD_DIM = 128
"""What transformers' Qwen3Config takes when config.json has no head_dim."""

FIELDS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "moe_intermediate_size",
}
"""Option of the model group -> field of Architecture."""


def resolve(hf_config: Mapping[str, Any] | None, model: ModelConfig) -> Architecture:
    """The policy's sizes. `hf_config` is model_path/config.json, None when there is no such folder.

    The model group may only narrow what config.json says: a lower max_position_embeddings is kept, any other value that
    differs would describe weights that are not in the folder. Raises PlanError with every difference.
    """
    if hf_config is None:
        return from_model_config(model)
    arch = from_hf(hf_config)
    found = disagreements(arch, hf_config, model)
    if found:
        raise PlanError(
            f"the model group contradicts model_path/config.json: {'; '.join(found)}. Weights of another shape cannot be"
            " loaded: choose model=from_path, or the model_path of that model"
        )
    return _narrowed(arch, model.max_position_embeddings)


def disagreements(arch: Architecture, hf_config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Values that the model group sets and config.json contradicts, each with both."""
    pairs: list[tuple[str, Any, Any]] = [
        (name, getattr(model, name), getattr(arch, field)) for name, field in FIELDS.items() if getattr(model, name)
    ]
    if model.architecture:
        pairs.append(("architecture", model.architecture, arch.name))
    if model.tie_word_embeddings is not None:
        pairs.append(("tie_word_embeddings", model.tie_word_embeddings, arch.tied))
    if model.rope_theta is not None:
        pairs.append(("rope_theta", model.rope_theta, rope_theta(hf_config)))
    found = [f"model.{name}={ours}, config.json has {theirs}" for name, ours, theirs in pairs if ours != theirs]
    if arch.max_positions and model.max_position_embeddings > arch.max_positions:
        found.append(
            f"model.max_position_embeddings={model.max_position_embeddings}, config.json has only {arch.max_positions}"
        )
    return found


def _narrowed(arch: Architecture, max_positions: int) -> Architecture:
    if not max_positions:
        return arch
    return Architecture(**{**arch.__dict__, "max_positions": max_positions})


def rope_theta(hf_config: Mapping[str, Any]) -> float:
    """Base of the rotary embedding, from transformers 5 (`rope_parameters`) or from older files. Raises PlanError."""
    config = _reader(hf_config)
    return config.part("rope_parameters").positive("rope_theta", config.positive("rope_theta", DEFAULT_ROPE_THETA))


def from_model_config(model: ModelConfig) -> Architecture:
    """Raises PlanError when the model group leaves sizes open (they come from model_path/config.json then)."""
    is_moe = model.architecture in MIXTURE_OF_EXPERTS
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    optional = ("head_dim", "intermediate_size") if is_moe else ("head_dim", *experts)
    missing = [f"model.{name}" for name in FIELDS if name not in optional and getattr(model, name) == 0]
    if missing or not model.architecture:
        wanted = ", ".join(missing or ["model.architecture"])
        raise PlanError(
            f"the model's sizes are unknown: set model_path to a HF folder, or choose model=..., or set {wanted}"
        )
    if not is_moe and any(getattr(model, name) for name in experts):
        raise PlanError(
            f"model.num_experts={model.num_experts}, but model.architecture={model.architecture} has no experts;"
            f" leave {', '.join(f'model.{name}' for name in experts)} at 0"
        )
    return _checked(
        Architecture(
            name=model.architecture,
            layers=model.num_hidden_layers,
            hidden=model.hidden_size,
            intermediate=model.intermediate_size,
            heads=model.num_attention_heads,
            key_value_heads=model.num_key_value_heads,
            head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
            vocab=model.vocab_size,
            tied=bool(model.tie_word_embeddings),
            max_positions=model.max_position_embeddings,
            num_experts=model.num_experts,
            experts_per_token=model.num_experts_per_tok,
            moe_intermediate_size=model.moe_intermediate_size,
        )
    )


def from_hf(config: Mapping[str, Any]) -> Architecture:
    """Sizes from a HF config.json. Raises PlanError for an architecture that cannot be planned, and for values that are missing
    or of another kind than they must be."""
    hf = _reader(config)
    name = hf.architecture()
    if name not in SUPPORTED:
        raise PlanError(f"model_path holds {name}; supported: {', '.join(SUPPORTED)}")
    return _checked(
        Architecture(
            name=name,
            layers=hf.size("num_hidden_layers"),
            hidden=hf.size("hidden_size"),
            intermediate=hf.size("intermediate_size"),
            heads=hf.size("num_attention_heads"),
            key_value_heads=hf.size("num_key_value_heads", hf.size("num_attention_heads")),
            head_dim=hf.head_dim(QWEN3_HEAD_DIM if name == "Qwen3ForCausalLM" else None),
            vocab=hf.size("vocab_size"),
            tied=hf.switch("tie_word_embeddings"),
            max_positions=hf.size("max_position_embeddings", 0),
            **(_experts(hf) if name in MIXTURE_OF_EXPERTS else {}),
        )
    )


def _experts(hf: HfConfig) -> dict[str, int]:
    """Experts of a Qwen3-MoE. Refuses models where only some layers have them: their sizes would be counted wrongly."""
    plain: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    for key, wanted in plain.items():
        found = hf.values.get(key) or wanted
        if found != wanted:
            raise PlanError(f"{hf.where} says {key} {found}; supported: {wanted}, experts in every layer")
    # transformers 5 writes num_local_experts where older releases wrote num_experts.
    count = "num_local_experts" if "num_local_experts" in hf.values else "num_experts"
    return {
        "num_experts": hf.size(count),
        "experts_per_token": hf.size("num_experts_per_tok"),
        "moe_intermediate_size": hf.size("moe_intermediate_size"),
    }


def _reader(config: Mapping[str, Any]) -> HfConfig:
    return HfConfig(config, PlanError, "model_path/config.json")


def _checked(arch: Architecture) -> Architecture:
    if arch.heads % arch.key_value_heads:
        raise PlanError(
            f"the model has {arch.heads} attention heads, which is no multiple of its {arch.key_value_heads} key/value"
            " heads; change model.num_key_value_heads or model_path"
        )
    if arch.experts_per_token > arch.num_experts:
        raise PlanError(
            f"the model visits {arch.experts_per_token} of {arch.num_experts} experts; change model.num_experts_per_tok"
        )
    return arch
