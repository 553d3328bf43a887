"""Which HF models the trainer can train, decided from config.json alone (no torch: the launcher asks the same questions)."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from planner.hf_config import HfConfig

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ROPE = ("default", "llama3")


class ModelError(ValueError):
    """The model that was asked for cannot be trained as asked."""


class ModelFolderError(ModelError):
    """The model folder, or a file that it must hold, is missing or unreadable."""


class UnsupportedModelError(ModelError):
    """config.json describes a model that the trainer would train wrongly or not at all."""


class TensorParallelError(ModelError):
    """The model cannot be split over this tensor-parallel size."""


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1 and later; field names as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Architecture:
    """What the trainer needs to know of a model; sizes in elements."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    tied_embeddings: bool

    @property
    def qkv_bias(self) -> bool:
        return self.name == "Qwen2ForCausalLM"

    @property
    def qk_norm(self) -> bool:
        return self.name == "Qwen3ForCausalLM"


def read_config(model_path: str | Path) -> dict[str, Any]:
    """config.json of a HF folder. Raises ModelFolderError."""
    path = Path(model_path) / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path} does not exist; set model_path to a HF model folder") from error
    except (json.JSONDecodeError, UnicodeDecodeError, NotADirectoryError) as error:
        raise ModelFolderError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds {type(value).__name__}, wanted a JSON object")
    return value


def check_supported(hf_config: dict[str, Any]) -> None:
    """Raise UnsupportedModelError, saying what is supported, unless the trainer can train this model exactly."""
    read_architecture(hf_config)


def read_architecture(hf_config: dict[str, Any]) -> Architecture:
    """The model of a config.json. Raises UnsupportedModelError for whatever the trainer does not compute as HF does."""
    hf = HfConfig(hf_config, UnsupportedModelError)
    name = hf.architecture()
    if name not in SUPPORTED:
        raise UnsupportedModelError(f"config.json says architecture {name}; supported: {', '.join(SUPPORTED)}")
    _refuse_variants(hf_config, name)
    num_heads = hf.size("num_attention_heads")
    num_kv_heads = hf.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    theta, scaling = _rope(hf)
    return Architecture(
        name=name,
        num_layers=hf.size("num_hidden_layers"),
        hidden_size=hf.size("hidden_size"),
        ffn_hidden_size=hf.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hf.head_dim(128 if name == "Qwen3ForCausalLM" else None),
        vocab_size=hf.size("vocab_size"),
        max_position_embeddings=hf.size("max_position_embeddings"),
        norm_eps=hf.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=hf.switch("tie_word_embeddings"),
    )


def check_tensor_parallel(architecture: Architecture, tp: int) -> None:
    """Raise TensorParallelError, naming sizes that work, when the model cannot be split over `tp` ranks."""
    parts = {
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "intermediate_size": architecture.ffn_hidden_size,
    }
    uneven = [f"{name} {size}" for name, size in parts.items() if size % tp]
    if uneven:
        works = [n for n in range(1, architecture.num_kv_heads + 1) if not any(size % n for size in parts.values())]
        raise TensorParallelError(
            f"train_tp_size {tp} does not divide {' and '.join(uneven)}; it may be one of {works}"
        )
    rows = -(-architecture.vocab_size // tp)
    if rows * (tp - 1) >= architecture.vocab_size:
        raise TensorParallelError(
            f"vocab_size {architecture.vocab_size} is too small for train_tp_size {tp}; lower train_tp_size"
        )


def _refuse_variants(hf_config: dict[str, Any], name: str) -> None:
    """Variants of the three families that change the computation and that the trainer does not build."""
    layer_types = hf_config.get("layer_types") or ["full_attention"]
    is_full = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    refused = {
        "attention_bias": (bool(hf_config.get("attention_bias")) and name != "Qwen2ForCausalLM", "false"),
        "mlp_bias": (bool(hf_config.get("mlp_bias")), "false"),
        "hidden_act": (hf_config.get("hidden_act", "silu") != "silu", "silu"),
        "use_sliding_window": (bool(hf_config.get("use_sliding_window")), "false"),
        "layer_types": (not is_full, "full_attention"),
        "partial_rotary_factor": (hf_config.get("partial_rotary_factor") not in (None, 1.0), "1.0"),
        "quantization_config": (bool(hf_config.get("quantization_config")), "none"),
    }
    for key, (is_refused, supported) in refused.items():
        if is_refused:
            raise UnsupportedModelError(
                f"config.json of this {name} says {key} {hf_config.get(key)}; supported: {supported}"
            )


def _rope(hf: HfConfig) -> tuple[float, Llama3Rope | None]:
    """Base and scaling, from transformers 5 (`rope_parameters`) or from older files (`rope_theta`, `rope_scaling`)."""
    parameters, scaling = hf.part("rope_parameters"), hf.part("rope_scaling")
    rope = parameters if parameters.values else scaling
    theta = rope.positive("rope_theta", hf.positive("rope_theta", 10000.0))
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind not in SUPPORTED_ROPE:
        raise UnsupportedModelError(f"config.json says rope type {kind!r}; supported: {', '.join(SUPPORTED_ROPE)}")
    if rope.values.get("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {rope.values['partial_rotary_factor']}; supported: 1.0")
    return theta, None if kind == "default" else _llama3(rope)


def _llama3(rope: HfConfig) -> Llama3Rope:
    missing = [spec.name for spec in fields(Llama3Rope) if rope.values.get(spec.name) is None]
    if missing:
        raise UnsupportedModelError(f"config.json says rope type 'llama3' without {', '.join(map(repr, missing))}")
    return Llama3Rope(
        factor=rope.positive("factor", 1.0),
        low_freq_factor=rope.positive("low_freq_factor", 1.0),
        high_freq_factor=rope.positive("high_freq_factor", 1.0),
        original_max_position_embeddings=rope.size("original_max_position_embeddings"),
    )
