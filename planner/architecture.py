"""Sizes of a transformer policy, and what follows from them: parameters, bytes of the KV cache, FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass

DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MIXTURE_OF_EXPERTS = ("Qwen3MoeForCausalLM",)
SUPPORTED = DENSE + MIXTURE_OF_EXPERTS
"""Architectures that can be planned. What can be trained is `stages.trainer.architecture.SUPPORTED`."""


@dataclass(frozen=True)
class Architecture:
    """Decoder with grouped-query attention and a gated MLP, or experts with a router in its place; widths in elements.

    Where `num_experts` is not 0, every layer has experts and `intermediate` means nothing.
    """

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
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Of the keys; the values have as much."""
        return self.key_value_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Embedding and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def attention_parameters(self) -> int:
        """The q, k, v and o matrices of one layer."""
        return self.hidden * 2 * (self.query_width + self.key_value_width)

    @property
    def small_parameters(self) -> int:
        """Norms and biases of one layer: no matrix product reads them."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.name.startswith("Qwen3") else 0)
        return norms + (self.query_width + 2 * self.key_value_width if self.name == "Qwen2ForCausalLM" else 0)

    @property
    def expert_parameters(self) -> int:
        """Gate, up and down of one expert; 0 for a dense model."""
        return 3 * self.hidden * self.moe_intermediate_size

    @property
    def dense_mlp_parameters(self) -> int:
        """What every token reads of one layer's MLP: gate, up and down, or the router."""
        return self.hidden * self.num_experts if self.is_moe else 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All of them: what memory and transfers are about."""
        layer = self.attention_parameters + self.small_parameters + self.dense_mlp_parameters
        return (
            self.embedding_parameters + self.hidden + self.layers * (layer + self.num_experts * self.expert_parameters)
        )

    @property
    def active_parameters(self) -> int:
        """Those that one token visits: all, or with experts_per_token of num_experts experts in each layer."""
        idle = self.num_experts - self.experts_per_token
        return self.parameters - self.layers * idle * self.expert_parameters

    @property
    def layer_matrix_parameters(self) -> int:
        """Elements of one layer's matrices that one token is multiplied with: 2 FLOPs for each, forward."""
        experts = self.experts_per_token * self.expert_parameters
        return self.attention_parameters + self.dense_mlp_parameters + experts

    @property
    def matrix_parameters(self) -> int:
        """The same for the whole model: all layers and the head (the embedding is a look-up)."""
        return self.layers * self.layer_matrix_parameters + self.vocab * self.hidden

    def parameters_read(self, sequences: float) -> float:
        """Parameters read in one decode step of `sequences` sequences: each of them once, of the experts the touched ones.

        Expected number of distinct experts of a layer when each token picks its experts independently and evenly:
        E (1 - (1 - k/E)^sequences). The embedding is read only where it is the head too.
        """
        looked_up = 0 if self.tied else self.vocab * self.hidden
        if not self.is_moe:
            return self.parameters - looked_up
        missed = math.pow(1 - self.experts_per_token / self.num_experts, sequences)
        untouched = self.num_experts * missed * self.expert_parameters
        return self.parameters - looked_up - self.layers * untouched

    def attention_flops(self, tokens: float) -> float:
        """Forward FLOPs of scores and weighted values over all layers, for one causal sequence.

        Two products of 2 FLOPs for each pair of positions and element of the query width; a causal mask leaves half the
        pairs.
        """
        return self.layers * 2.0 * self.query_width * tokens**2

    @property
    def key_value_elements_per_token(self) -> int:
        return 2 * self.layers * self.key_value_width

    def key_value_elements_per_gpu(self, tp: int) -> int:
        """One token's share of one of `tp` ranks of an instance. Heads that are fewer than ranks are kept several times."""
        return 2 * self.layers * max(1, self.key_value_heads // tp) * self.head_dim
