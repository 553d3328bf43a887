"""Where every HF tensor lives in a megatron-core GPTModel: one table for reading and writing, for any tensor-parallel size.

Megatron fuses q, k and v of one group of heads (one key/value head and the query heads that share it) into consecutive
rows of `linear_qkv`, and the gate above the up projection in `linear_fc1`; each tensor-parallel rank holds a run of
groups, or of gate and up rows. So what a rank holds of a HF tensor is always one slice along one dimension, found in
the local parameter as the same `size / groups` rows of each of `groups` blocks. No torch: shapes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stages.trainer.architecture import Architecture


@dataclass(frozen=True)
class Piece:
    """This rank's slice of one HF tensor, and the rows of a Megatron parameter that hold it.

    HF side: [start : start + size] along `dim` of a tensor of `full_shape`. Megatron side: seen as
    [groups, rows per group, ...], the rows offset .. offset + rows of every group. `replicated`: every tensor-parallel
    rank holds the whole tensor.
    """

    parameter: str
    hf_name: str
    full_shape: tuple[int, ...]
    dim: int
    start: int
    size: int
    groups: int = 1
    offset: int = 0
    replicated: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return (*self.full_shape[: self.dim], self.size, *self.full_shape[self.dim + 1 :])

    @property
    def rows(self) -> int:
        """Rows of one group that belong to the slice."""
        return self.local_shape[0] // self.groups

    @property
    def elements(self) -> int:
        count = 1
        for size in self.local_shape:
            count *= size
        return count


def pieces(architecture: Architecture, tp_rank: int, tp: int) -> list[Piece]:
    """Everything that tensor-parallel rank `tp_rank` of `tp` holds, in the order of the model."""
    split = _Split(architecture, tp_rank, tp)
    found = [split.vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight")]
    for layer in range(architecture.num_layers):
        found += _layer(split, f"decoder.layers.{layer}", f"model.layers.{layer}")
    found.append(split.whole("decoder.final_layernorm.weight", "model.norm.weight", architecture.hidden_size))
    if not architecture.tied_embeddings:
        found.append(split.vocabulary("output_layer.weight", "lm_head.weight"))
    return found


def hf_tensors(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the HF model."""
    return {piece.hf_name: piece.full_shape for piece in pieces(architecture, 0, 1)}


def padded_vocab_size(architecture: Architecture, tp: int) -> int:
    """Rows of the embedding over all ranks: the vocabulary, rounded up so that every rank has the same number."""
    return -(-architecture.vocab_size // tp) * tp


def _layer(split: _Split, here: str, hf: str) -> Iterator[Piece]:
    model = split.architecture
    attention, hf_attention = f"{here}.self_attention", f"{hf}.self_attn"
    yield split.whole(f"{here}.input_layernorm.weight", f"{hf}.input_layernorm.weight", model.hidden_size)
    yield from split.qkv(f"{attention}.linear_qkv.weight", hf_attention, "weight", (model.hidden_size,))
    if model.qkv_bias:
        yield from split.qkv(f"{attention}.linear_qkv.bias", hf_attention, "bias", ())
    if model.qk_norm:
        yield split.whole(f"{attention}.q_layernorm.weight", f"{hf_attention}.q_norm.weight", model.head_dim)
        yield split.whole(f"{attention}.k_layernorm.weight", f"{hf_attention}.k_norm.weight", model.head_dim)
    width = model.num_heads * model.head_dim
    yield split.columns(f"{attention}.linear_proj.weight", f"{hf_attention}.o_proj.weight", width)
    yield split.whole(f"{here}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", model.hidden_size)
    yield from split.gate_up(f"{here}.mlp.linear_fc1.weight", f"{hf}.mlp")
    yield split.columns(f"{here}.mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight", model.ffn_hidden_size)


@dataclass(frozen=True)
class _Split:
    architecture: Architecture
    tp_rank: int
    tp: int

    def whole(self, parameter: str, hf_name: str, size: int) -> Piece:
        return Piece(parameter, hf_name, (size,), 0, 0, size, replicated=self.tp > 1)

    def vocabulary(self, parameter: str, hf_name: str) -> Piece:
        """Rows of the embedding or the head; the rows that pad the last rank are no part of the piece."""
        model = self.architecture
        rows = padded_vocab_size(model, self.tp) // self.tp
        start = self.tp_rank * rows
        return Piece(
            parameter, hf_name, (model.vocab_size, model.hidden_size), 0, start, min(rows, model.vocab_size - start)
        )

    def columns(self, parameter: str, hf_name: str, width: int) -> Piece:
        """A row-parallel matrix: its input dimension is split."""
        size = width // self.tp
        return Piece(parameter, hf_name, (self.architecture.hidden_size, width), 1, self.tp_rank * size, size)

    def qkv(self, parameter: str, hf_attention: str, kind: str, rest: tuple[int, ...]) -> Iterator[Piece]:
        model = self.architecture
        groups = model.num_kv_heads // self.tp
        query_rows = model.num_heads // model.num_kv_heads * model.head_dim
        offset = 0
        for name, rows in (("q_proj", query_rows), ("k_proj", model.head_dim), ("v_proj", model.head_dim)):
            size = groups * rows
            shape = (size * self.tp, *rest)
            yield Piece(parameter, f"{hf_attention}.{name}.{kind}", shape, 0, self.tp_rank * size, size, groups, offset)
            offset += rows

    def gate_up(self, parameter: str, hf_mlp: str) -> Iterator[Piece]:
        model = self.architecture
        size = model.ffn_hidden_size // self.tp
        shape = (model.ffn_hidden_size, model.hidden_size)
        for index, name in enumerate(("gate_proj", "up_proj")):
            yield Piece(parameter, f"{hf_mlp}.{name}.weight", shape, 0, self.tp_rank * size, size, 1, index * size)
