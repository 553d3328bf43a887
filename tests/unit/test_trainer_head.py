"""Log-probs in chunks equal the plain softmax, forward and backward (one rank; several are in tests/contract)."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from stages.trainer import head
from stages.trainer.head import VocabShard, token_logprobs


class Alone:
    """A tensor-parallel group of one rank."""

    def size(self) -> int:
        return 1


def shard(rows: int) -> VocabShard:
    return VocabShard(0, rows, cast(dist.ProcessGroup, Alone()))


def example(tokens: int, padding: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 6, generator=generator, requires_grad=True)
    weight = torch.randn(11 + padding, 6, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(tokens, generator=generator)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 11 * 3, 2**20], ids=["one token", "three tokens", "all"])
@pytest.mark.parametrize("padding", [0, 2])
def test_values_and_gradients_equal_the_plain_softmax(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, padding: int
) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk_bytes)
    hidden, weight, targets, upstream = example(7, padding)

    computed = token_logprobs(hidden, weight, targets, shard(11), 0.7)
    gradients = torch.autograd.grad(computed, (hidden, weight), upstream)

    plain = (hidden @ weight[:11].T / 0.7).log_softmax(-1)[torch.arange(7), targets]
    expected = torch.autograd.grad(plain, (hidden, weight), upstream)
    torch.testing.assert_close(computed, plain)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_rows_that_pad_the_vocabulary_have_no_probability_and_no_gradient() -> None:
    hidden, weight, targets, upstream = example(7, padding=3)
    with torch.no_grad():
        weight[11:] = 1e6

    computed = token_logprobs(hidden, weight, targets, shard(11), 1.0)
    (gradient,) = torch.autograd.grad(computed, weight, upstream)

    assert torch.isfinite(computed).all()
    assert (gradient[11:] == 0).all()


def test_no_tokens_give_no_logprobs_and_zero_gradients() -> None:
    hidden, weight, targets, _ = example(0, padding=0)

    computed = token_logprobs(hidden, weight, targets, shard(11), 1.0)
    gradients = torch.autograd.grad(computed.sum(), (hidden, weight))

    assert computed.shape == (0,)
    assert (gradients[1] == 0).all()


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets, _ = example(7, padding=0)

    computed = token_logprobs(hidden * 1e4, weight, targets, shard(11), 1.0)

    assert torch.isfinite(computed).all()
