"""The last look at a batch before it changes the weights: staleness is tested again here."""

from __future__ import annotations

from conf.schema import LibraConfig
from stages.batches import Batch, BatchError


class StaleBatchError(BatchError):
    """A batch holds tokens that are older than max_head_offpolicyness allows, or newer than the weights."""


def check_consumable(batch: Batch, step: int, config: LibraConfig, vocab_size: int) -> None:
    """Raise StaleBatchError or BatchError unless `batch` may train version `step` of the weights."""
    staleness = step - batch.oldest_version
    if staleness > config.max_head_offpolicyness:
        raise StaleBatchError(
            f"batch {step} holds tokens of version {batch.oldest_version}: staleness {staleness} is more than "
            f"max_head_offpolicyness {config.max_head_offpolicyness}"
        )
    if batch.newest_version > step:
        raise StaleBatchError(f"batch {step} holds tokens of version {batch.newest_version}, which does not exist yet")
    largest = int(batch.token_ids.max())
    if largest >= vocab_size:
        raise BatchError(f"batch {step} holds token id {largest}; the model's vocabulary has {vocab_size}")
    longest = int(batch.lengths.max())
    if longest > config.max_model_len:
        raise BatchError(f"batch {step} holds a sequence of {longest} tokens; max_model_len is {config.max_model_len}")
