"""Sizes of the model group that cannot belong to one model. 0 leaves a size to config.json, so it contradicts nothing."""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import LibraConfig

MIXTURES = ("Qwen3MoeForCausalLM",)
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def heads_come_in_groups(config: LibraConfig) -> Iterator[str]:
    model = config.model
    if model.num_key_value_heads and model.num_attention_heads % model.num_key_value_heads:
        yield (
            f"model.num_attention_heads={model.num_attention_heads} is not a multiple of"
            f" model.num_key_value_heads={model.num_key_value_heads}; change one of them"
        )


def heads_fill_the_width(config: LibraConfig) -> Iterator[str]:
    model = config.model
    if not model.head_dim and model.num_attention_heads and model.hidden_size % model.num_attention_heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not a multiple of model.num_attention_heads="
            f"{model.num_attention_heads}; set model.head_dim, or change one of them"
        )


def experts_only_in_a_mixture(config: LibraConfig) -> Iterator[str]:
    model = config.model
    given = [name for name in EXPERT_SIZES if getattr(model, name)]
    if model.architecture and model.architecture not in MIXTURES and given:
        sizes = ", ".join(f"model.{name}={getattr(model, name)}" for name in given)
        yield f"{sizes}: model.architecture={model.architecture} has no experts; set them to 0 or change model.architecture"


def a_mixture_has_experts(config: LibraConfig) -> Iterator[str]:
    model = config.model
    if model.architecture not in MIXTURES:
        return
    missing = [f"model.{name}" for name in EXPERT_SIZES if not getattr(model, name)]
    if missing:
        yield f"model.architecture={model.architecture} needs {', '.join(missing)}; set {' and '.join(missing)}"
    elif model.num_experts_per_tok > model.num_experts:
        yield (
            f"model.num_experts_per_tok={model.num_experts_per_tok} is more than model.num_experts={model.num_experts};"
            " lower model.num_experts_per_tok"
        )


RULES = (
    heads_come_in_groups,
    heads_fill_the_width,
    experts_only_in_a_mixture,
    a_mixture_has_experts,
)
