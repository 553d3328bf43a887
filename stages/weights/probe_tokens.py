"""The fixed token sequence of a run's proofs of load."""

from __future__ import annotations

import numpy as np

from conf.schema import LibraConfig


def probe_tokens(config: LibraConfig, vocab_size: int) -> tuple[int, ...]:
    """weights.probe_tokens ids drawn over the whole vocabulary from the run's seed; one less than fits into the context.

    The engine must be able to generate one token after them.
    """
    count = min(config.weights.probe_tokens, config.max_model_len - 1)
    draws = np.random.default_rng([config.seed, vocab_size]).integers(0, vocab_size, size=count)
    return tuple(int(token) for token in draws)
