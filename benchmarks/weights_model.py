"""Made-up models for the benchmarks of the weight exchange: HF names, shapes and config.json, random values, no download."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STANDARD_DEVIATION = 0.02


@dataclass(frozen=True)
class Shape:
    """A decoder of one of the two families that differ in bias and in little else; sizes as in its config.json."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 4096

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.tensors().values()))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """HF name -> shape; embedding and head are two tensors."""
        hidden, kv = self.hidden_size, self.num_key_value_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (self.intermediate_size, hidden),
            "mlp.up_proj.weight": (self.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, self.intermediate_size),
        }
        if self.family == "qwen2":
            layer |= {f"self_attn.{name}_proj.bias": layer[f"self_attn.{name}_proj.weight"][:1] for name in "qkv"}
        table = (self.vocab_size, hidden)
        layers = {
            f"model.layers.{number}.{name}": shape
            for number in range(self.num_hidden_layers)
            for name, shape in layer.items()
        }
        return {"model.embed_tokens.weight": table, **layers, "model.norm.weight": (hidden,), "lm_head.weight": table}

    def config(self, dtype: str) -> dict[str, Any]:
        """Contents of config.json."""
        sizes = {key: value for key, value in vars(self).items() if key != "family"}
        classes = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
        return {
            "architectures": [classes[self.family]],
            "model_type": self.family,
            **sizes,
            "hidden_act": "silu",
            "initializer_range": STANDARD_DEVIATION,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": dtype,
        }


QWEN_7B = Shape("qwen2", 3584, 18944, 28, 28, 4, 152064)
"""Qwen2.5-7B: 7.6e9 parameters, 15.2 GB in bfloat16."""
TINY = Shape("llama", 64, 128, 2, 2, 1, 64, 256)
_WIDTHS = (
    (0.5e9, Shape("llama", 2048, 5632, 1, 32, 4, 32000)),
    (0.05e9, Shape("llama", 768, 2048, 1, 12, 4, 8192)),
    (0.002e9, Shape("llama", 256, 704, 1, 8, 4, 1024)),
    (0.0, TINY),
)
"""From how many bytes on a model of so many gets this width."""


def shape_of_bytes(wanted_bytes: float, width: int) -> Shape:
    """A Llama of about `wanted_bytes` at `width` bytes per parameter, at least one layer."""
    narrow = next(shape for least, shape in _WIDTHS if wanted_bytes >= least)
    two = Shape(**{**vars(narrow), "num_hidden_layers": 2})
    one = Shape(**{**vars(narrow), "num_hidden_layers": 1})
    layer = two.parameters - one.parameters
    layers = max(1, 1 + round((wanted_bytes / width - one.parameters) / layer))
    return Shape(**{**vars(narrow), "num_hidden_layers": layers})


@torch.no_grad()
def random_tensors(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> dict[str, torch.Tensor]:
    """The parameters as the trainer would hold them: norms 1, the rest normal; the same for the same device and seed."""
    generator = torch.Generator(device).manual_seed(seed)
    made = {}
    for name, size in shape.tensors().items():
        if name.endswith("norm.weight"):
            made[name] = torch.ones(size, dtype=dtype, device=device)
        else:
            empty = torch.empty(size, dtype=dtype, device=device)
            made[name] = empty.normal_(0.0, STANDARD_DEVIATION, generator=generator)
    return made


def write_config(folder: Path, shape: Shape, dtype: str) -> Path:
    """A HF folder without weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(dtype), indent=1))
    return folder
