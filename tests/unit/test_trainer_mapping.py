"""The table between HF tensors and Megatron parameters covers both sides exactly, for every size and split."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.trainer.architecture import Architecture, check_tensor_parallel
from stages.trainer.mapping import Piece, hf_tensors, padded_vocab_size, pieces


@st.composite
def split_models(draw: st.DrawFn) -> tuple[Architecture, int]:
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    kv_heads = tp * draw(st.integers(1, 2))
    architecture = Architecture(
        name=draw(st.sampled_from(["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])),
        num_layers=draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 6)),
        ffn_hidden_size=tp * draw(st.integers(1, 3)),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(12, 30)),
        max_position_embeddings=8,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        tied_embeddings=draw(st.booleans()),
    )
    check_tensor_parallel(architecture, tp)
    return architecture, tp


def hf_slice(piece: Piece) -> tuple[slice, ...]:
    part = slice(piece.start, piece.start + piece.size)
    return (slice(None),) * piece.dim + (part,)


def parameter_rows(architecture: Architecture, tp: int) -> dict[str, int]:
    """Rows that Megatron gives every rank's parameters, by the end of their names."""
    qkv = (architecture.num_heads + 2 * architecture.num_kv_heads) * architecture.head_dim // tp
    return {
        "word_embeddings.weight": padded_vocab_size(architecture, tp) // tp,
        "output_layer.weight": padded_vocab_size(architecture, tp) // tp,
        "linear_qkv.weight": qkv,
        "linear_qkv.bias": qkv,
        "q_layernorm.weight": architecture.head_dim,
        "k_layernorm.weight": architecture.head_dim,
        "linear_fc1.weight": 2 * architecture.ffn_hidden_size // tp,
        "": architecture.hidden_size,  # all others: norms, linear_proj, linear_fc2
    }


@given(model=split_models())
def test_ranks_together_hold_every_element_of_every_hf_tensor_once(model: tuple[Architecture, int]) -> None:
    architecture, tp = model
    counts = {name: np.zeros(shape, int) for name, shape in hf_tensors(architecture).items()}

    for rank in range(tp):
        for piece in pieces(architecture, rank, tp):
            if rank == 0 or not piece.replicated:
                counts[piece.hf_name][hf_slice(piece)] += 1

    assert all((count == 1).all() for count in counts.values())


@given(model=split_models())
def test_the_pieces_of_a_parameter_cover_its_rows_once_but_for_padding(model: tuple[Architecture, int]) -> None:
    architecture, tp = model
    for rank in range(tp):
        rows: dict[str, npt.NDArray[np.int_]] = {}
        for piece in pieces(architecture, rank, tp):
            size = next(s for end, s in parameter_rows(architecture, tp).items() if piece.parameter.endswith(end))
            count = rows.setdefault(piece.parameter, np.zeros(size, int))
            count.reshape(piece.groups, -1)[:, piece.offset : piece.offset + piece.rows] += 1
        for parameter, count in rows.items():
            covered = count == 1
            if "embedding" in parameter or "output" in parameter:
                held = min(len(count), architecture.vocab_size - rank * len(count))
                assert covered[:held].all()
                assert not covered[held:].any()
            else:
                assert covered.all(), parameter


def test_query_rows_of_a_rank_are_consecutive_in_the_hf_tensor() -> None:
    architecture = Architecture("LlamaForCausalLM", 1, 16, 8, 8, 4, 2, 20, 8, 1e-6, 1e4, None, tied_embeddings=False)

    query = next(p for p in pieces(architecture, 1, 2) if p.hf_name.endswith("q_proj.weight"))

    assert (query.start, query.size, query.groups, query.offset, query.rows) == (8, 8, 2, 0, 4)


@pytest.mark.parametrize("vocab_size, tp, rows", [(51, 1, 51), (51, 2, 52), (52, 2, 52), (50, 4, 52)])
def test_the_vocabulary_is_padded_to_equal_shares(vocab_size: int, tp: int, rows: int) -> None:
    architecture = Architecture("LlamaForCausalLM", 1, 8, 8, 4, 4, 2, vocab_size, 8, 1e-6, 1e4, None, False)
    assert padded_vocab_size(architecture, tp) == rows
