"""A batch is tested again right before it trains the weights."""

from __future__ import annotations

import pytest

from conf.schema import LibraConfig
from stages.batches import Batch, BatchError, Sequence
from stages.trainer.consumption import StaleBatchError, check_consumable


def batch(versions: list[int]) -> Batch:
    n = len(versions)
    row = Sequence.of_completion([1, 2], [3] * n, [-0.5] * n, versions, reward=0.0, advantage=0.0, group_id=0)
    return Batch.pack([row])


CONFIG = LibraConfig(max_head_offpolicyness=2, max_model_len=6)


@pytest.mark.parametrize("versions", [[5], [3, 4, 5], [3, 3]])
def test_tokens_within_the_bound_are_consumed(versions: list[int]) -> None:
    check_consumable(batch(versions), 5, CONFIG, vocab_size=4)


@pytest.mark.exercises("max_head_offpolicyness")
def test_one_token_that_is_too_old_refuses_the_batch() -> None:
    with pytest.raises(StaleBatchError, match="staleness 3 is more than max_head_offpolicyness 2"):
        check_consumable(batch([5, 2, 5]), 5, CONFIG, vocab_size=4)


def test_a_token_of_a_version_that_does_not_exist_refuses_the_batch() -> None:
    with pytest.raises(StaleBatchError, match="does not exist yet"):
        check_consumable(batch([6]), 5, CONFIG, vocab_size=4)


def test_a_token_outside_the_vocabulary_refuses_the_batch() -> None:
    with pytest.raises(BatchError, match="token id 3; the model's vocabulary has 3"):
        check_consumable(batch([5]), 5, CONFIG, vocab_size=3)


@pytest.mark.exercises("max_model_len")
def test_a_sequence_that_is_too_long_refuses_the_batch() -> None:
    with pytest.raises(BatchError, match="max_model_len is 6"):
        check_consumable(batch([5] * 5), 5, CONFIG, vocab_size=4)
