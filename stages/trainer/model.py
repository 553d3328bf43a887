"""A HF architecture as a megatron-core GPTModel."""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from stages.trainer.architecture import Architecture
from stages.trainer.attention import SdpaAttention
from stages.trainer.mapping import padded_vocab_size, pieces


class PolicyModel(GPTModel):
    """A GPTModel whose forward ends before the output layer.

    The log-probabilities are computed from the hidden states by `stages.trainer.head`, in chunks and only where they
    are needed, so that logits of the whole batch never exist.
    """

    def _postprocess(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """[s, b, hidden], after the final norm."""
        return hidden_states

    @property
    def head_weight(self) -> torch.Tensor:
        """[rows of this rank, hidden]: the output layer, or the embedding when the two are tied."""
        if self.share_embeddings_and_output_weights:
            return cast(torch.Tensor, self.shared_embedding_or_output_weight())
        return cast(torch.Tensor, self.output_layer.weight)


def build_model(architecture: Architecture, *, tp: int, dtype: torch.dtype, device: torch.device) -> PolicyModel:
    """The model with uninitialised weights (`hf_weights.load_weights` fills them), on `device`, in `dtype`."""
    on_cpu = device.type == "cpu"
    model = PolicyModel(
        config=transformer_config(architecture, tp=tp, dtype=dtype, on_cpu=on_cpu),
        transformer_layer_spec=_layer_spec(architecture),
        vocab_size=padded_vocab_size(architecture, tp),
        max_sequence_length=architecture.max_position_embeddings,
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
    )
    _scale_rope(model, architecture)
    _mark_split_parameters(model, architecture, tp)
    return cast(PolicyModel, model.to(device=device, dtype=dtype))


def transformer_config(architecture: Architecture, *, tp: int, dtype: torch.dtype, on_cpu: bool) -> TransformerConfig:
    """megatron-core's configuration. Fusions stay off: they compile at run time or need apex."""
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        tensor_model_parallel_size=tp,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=on_cpu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )


def _layer_spec(architecture: Architecture) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=architecture.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    return spec


def _scale_rope(model: PolicyModel, architecture: Architecture) -> None:
    """Apply Llama 3 frequency scaling with the model's own numbers (GPTModel's option takes only the factor)."""
    scaling = architecture.rope_scaling
    if scaling is not None:
        rope = model.rotary_pos_emb
        rope.inv_freq = rope._apply_scaling(
            rope.inv_freq,
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
        )


def _mark_split_parameters(model: PolicyModel, architecture: Architecture, tp: int) -> None:
    """Tell the gradient norm which parameters differ between tensor-parallel ranks.

    megatron-core sets the mark while it draws initial weights, which `perform_initialization=False` leaves out; without
    it only the first rank's part would count.
    """
    parameters = dict(model.named_parameters())
    for piece in pieces(architecture, 0, tp):
        if not piece.replicated:
            parameters[piece.parameter].tensor_model_parallel = True
