"""Attention core through torch SDPA, in the place of megatron-core's unfused one."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch.nn.functional import scaled_dot_product_attention


class SdpaAttention(torch.nn.Module):
    """Causal attention for the `core_attention` slot of megatron-core's SelfAttention.

    Exact for right-padded batches: under a causal mask no real token looks at the padding after it. The constructor's
    signature is the slot's; what has no meaning here is taken in `_unused`.
    """

    def __init__(
        self, config: Any, attn_mask_type: AttnMaskType, softmax_scale: float | None = None, **_unused: Any
    ) -> None:
        super().__init__()
        if attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"SdpaAttention is causal only, asked for {attn_mask_type}")
        if config.context_parallel_size != 1:
            raise ValueError(
                f"SdpaAttention cannot split sequences, asked for context parallel {config.context_parallel_size}"
            )
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_unused: Any,
    ) -> torch.Tensor:
        """query [s, b, heads, d], key and value [s, b, kv heads, d] -> [s, b, heads * d]. A mask is refused."""
        if attention_mask is not None:
            raise ValueError("SdpaAttention takes no mask: batches are right-padded and attention is causal")
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        context = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped)
        return context.permute(2, 0, 1, 3).flatten(2)
