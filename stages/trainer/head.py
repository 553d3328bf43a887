"""Log-probabilities of given tokens from hidden states, split over the vocabulary, in chunks of tokens.

Symbols: N tokens, H hidden width, V vocabulary rows of this tensor-parallel rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

CHUNK_BYTES = 256 * 2**20


class VocabShard(NamedTuple):
    """The rows of the vocabulary that this rank holds: `rows` of them from `start`; rows beyond them pad the weight."""

    start: int
    rows: int
    group: dist.ProcessGroup


def token_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, shard: VocabShard, temperature: float
) -> torch.Tensor:
    """log softmax(hidden @ weight^T / temperature)[targets] over the whole vocabulary, float32 [N].

    hidden [N, H] and targets int64 [N] are the same on all tensor-parallel ranks; weight [>= V, H] is this rank's.
    Differentiable in hidden and weight. At most CHUNK_BYTES of float32 logits exist at a time, in the backward pass too,
    where they are computed again.
    """
    result: torch.Tensor = _VocabParallelLogprobs.apply(hidden, weight, targets, shard, temperature)
    return result


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        shard: VocabShard,
        temperature: float,
    ) -> torch.Tensor:
        local = targets - shard.start
        owned = (local >= 0) & (local < shard.rows)
        local = local.clamp(0, shard.rows - 1)
        target_logits, maxima, sums = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        for chunk in _chunks(len(hidden), shard.rows):
            logits = _logits(hidden[chunk], weight[: shard.rows], temperature)
            target_logits[chunk] = logits.gather(1, local[chunk, None]).squeeze(1).where(owned[chunk], 0.0)
            maxima[chunk] = logits.amax(dim=1)
            sums[chunk] = logits.sub_(maxima[chunk, None]).exp_().sum(dim=1)
        log_normaliser, target_logits = _combine(target_logits, maxima, sums, shard.group)
        ctx.save_for_backward(hidden, weight, local, owned, log_normaliser)
        ctx.shard, ctx.temperature = shard, temperature
        return target_logits - log_normaliser

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, local, owned, log_normaliser = ctx.saved_tensors
        shard, scale = ctx.shard, grads[0] / ctx.temperature
        rows = weight[: shard.rows]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in _chunks(len(hidden), shard.rows):
            probabilities = _logits(hidden[chunk], rows, ctx.temperature).sub_(log_normaliser[chunk, None]).exp_()
            grad_logits = probabilities.mul_(-scale[chunk, None])
            grad_logits.scatter_add_(1, local[chunk, None], scale[chunk, None].where(owned[chunk, None], 0.0))
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ rows
            grad_weight[: shard.rows] += grad_logits.T @ hidden[chunk]
        if shard.group.size() > 1:
            dist.all_reduce(grad_hidden, group=shard.group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    return (hidden @ weight.T).float().div_(temperature)


def _combine(
    target_logits: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log of the softmax denominator, target logits) over the whole vocabulary from each rank's part."""
    if group.size() > 1:
        highest = maxima.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        both = torch.stack([sums * (maxima - highest).exp(), target_logits])
        dist.all_reduce(both, group=group)
        (sums, target_logits), maxima = both, highest
    return maxima + sums.log(), target_logits


def _chunks(tokens: int, rows: int) -> list[slice]:
    size = max(1, CHUNK_BYTES // (4 * rows))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
