"""Dividing a batch loses nothing, repeats nothing, and gives all ranks the same number of micro-batches."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.batches import Batch, Sequence
from stages.trainer.micro_batches import MicroBatch, micro_batches, share_sequences

CPU = torch.device("cpu")
shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=20).filter(
    lambda rows: any(response for _, response in rows)
)
ranks = st.integers(1, 5)


def batch_of(rows: list[tuple[int, int]]) -> Batch:
    """Sequences of (prompt, response) lengths; token ids count up through the whole batch."""
    ends = np.cumsum([p + r for p, r in rows])
    return Batch.pack(
        Sequence(
            token_ids=np.arange(end - p - r, end),
            loss_mask=[0] * p + [1] * r,
            behaviour_logprobs=[0.0] * (p + r),
            versions=[-1] * p + [0] * r,
            reward=0.0,
            advantage=0.0,
            group_id=0,
        )
        for end, (p, r) in zip(ends, rows, strict=True)
    )


def all_micro_batches(batch: Batch, dp: int, size: int) -> list[list[MicroBatch]]:
    return [micro_batches(batch, rank, dp, size, CPU) for rank in range(dp)]


@given(rows=shapes, dp=ranks)
def test_every_sequence_goes_to_one_rank_and_counts_differ_by_at_most_one(rows: list[tuple[int, int]], dp: int) -> None:
    shares = share_sequences(batch_of(rows).lengths, dp)

    assert sorted(np.concatenate(shares)) == list(range(len(rows)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


@given(rows=shapes, dp=ranks)
def test_tokens_of_two_ranks_differ_by_no_more_than_the_longest_sequence_when_counts_are_equal(
    rows: list[tuple[int, int]], dp: int
) -> None:
    lengths = batch_of(rows * dp).lengths

    tokens = [int(lengths[share].sum()) for share in share_sequences(lengths, dp)]

    assert max(tokens) - min(tokens) <= lengths.max()


@given(rows=shapes, dp=ranks, size=st.integers(1, 6))
def test_all_ranks_run_the_same_number_of_micro_batches(rows: list[tuple[int, int]], dp: int, size: int) -> None:
    counts = {len(mine) for mine in all_micro_batches(batch_of(rows), dp, size)}

    assert len(counts) == 1


@given(rows=shapes, dp=ranks, size=st.integers(1, 6))
def test_every_loss_token_is_predicted_exactly_once_from_the_token_before_it(
    rows: list[tuple[int, int]], dp: int, size: int
) -> None:
    batch = batch_of(rows)
    seen = []

    for micro in (micro for mine in all_micro_batches(batch, dp, size) for micro in mine):
        by_position = micro.tokens.T.flatten()  # the order of Megatron's hidden states
        assert torch.equal(by_position[micro.source], micro.targets - 1), (
            "ids count up, so the one before is less by one"
        )
        assert torch.equal(torch.from_numpy(batch.token_ids)[micro.token_index].long(), micro.targets)
        seen += micro.token_index.tolist()

    assert sorted(seen) == np.flatnonzero(batch.loss_mask).tolist()


@given(rows=shapes, size=st.integers(1, 6))
def test_no_micro_batch_is_wider_than_its_longest_sequence(rows: list[tuple[int, int]], size: int) -> None:
    batch = batch_of(rows)
    share = share_sequences(batch.lengths, 1)[0]

    widths = [micro.tokens.shape[1] for micro in micro_batches(batch, 0, 1, size, CPU)]

    assert widths == [max(1, int(batch.lengths[share[i : i + size]].max()) - 1) for i in range(0, len(share), size)]
