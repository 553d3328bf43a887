"""A batch divided over data-parallel ranks and cut into right-padded micro-batches. Numpy in, torch tensors out."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stages.batches import Batch

Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MicroBatch:
    """B sequences padded to L tokens, without each one's last token (it predicts nothing), and their N loss tokens.

    tokens: int64 [B, L - 1]. For each loss token: `source`, the row of [(L - 1) * B, hidden] (position-major, as
    Megatron lays hidden states out) that predicts it; `targets`, its id; `token_index`, its place in the flat batch.
    All int64 [N].
    """

    tokens: torch.Tensor
    source: torch.Tensor
    targets: torch.Tensor
    token_index: torch.Tensor


def share_sequences(lengths: npt.NDArray[np.int32], dp: int) -> list[Index]:
    """Sequences of every data-parallel rank: equal counts (differing by at most one), tokens as even as longest-first gives.

    Each rank's are sorted from long to short, so that a micro-batch holds sequences of like length.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    most = -(-len(lengths) // dp)
    fuller = len(lengths) % dp or dp  # ranks that may still take the sequence that makes theirs `most`
    shares: list[list[int]] = [[] for _ in range(dp)]
    lightest = [(0, rank) for rank in range(dp)]
    for sequence in order:
        tokens, rank = heapq.heappop(lightest)
        while len(shares[rank]) == most - 1 and not fuller:
            tokens, rank = heapq.heappop(lightest)
        fuller -= len(shares[rank]) == most - 1
        shares[rank].append(int(sequence))
        if len(shares[rank]) < most:
            heapq.heappush(lightest, (tokens + int(lengths[sequence]), rank))
    return [np.asarray(share, np.int64) for share in shares]


def micro_batches(
    batch: Batch, dp_rank: int, dp: int, size: int, device: torch.device, *, keep: Mask | None = None
) -> list[MicroBatch]:
    """This rank's micro-batches of at most `size` sequences; every rank gets the same number (some may be without loss).

    `keep` (bool [S]) leaves sequences out, without changing which rank has which.
    """
    shares = share_sequences(batch.lengths, dp)
    if keep is not None:
        shares = [share[keep[share]] for share in shares]
    count = max(1, -(-max(len(share) for share in shares) // size))
    mine = shares[dp_rank]
    return [_pad(batch, mine[i * size : (i + 1) * size], device) for i in range(count)]


def loss_tokens_of_rank(batch: Batch, dp_rank: int, dp: int) -> npt.NDArray[np.int64]:
    """Places in the flat batch of the loss tokens in this rank's sequences, ascending."""
    mine = np.zeros(len(batch.lengths), bool)
    mine[share_sequences(batch.lengths, dp)[dp_rank]] = True
    return np.flatnonzero(np.repeat(mine, batch.lengths) & (batch.loss_mask == 1))


def _pad(batch: Batch, sequences: Index, device: torch.device) -> MicroBatch:
    starts, lengths = batch.cu_seqlens[sequences].astype(np.int64), batch.lengths[sequences].astype(np.int64)
    width = max(2, int(lengths.max(initial=2)))
    rows = max(1, len(sequences))
    row = np.repeat(np.arange(len(sequences)), lengths)
    position = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    flat = np.repeat(starts, lengths) + position
    tokens = np.zeros((rows, width), np.int64)
    tokens[row, position] = batch.token_ids[flat]
    has_loss = batch.loss_mask[flat] == 1
    token_index = flat[has_loss]
    source = (position[has_loss] - 1) * rows + row[has_loss]
    arrays = (np.ascontiguousarray(tokens[:, :-1]), source, batch.token_ids[token_index].astype(np.int64), token_index)
    return MicroBatch(*(torch.from_numpy(array).to(device) for array in arrays))
