"""How long trajectories are, for the cost model."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import LibraConfig


@dataclass(frozen=True)
class Lengths:
    """In tokens. The mean decides the work, the longest the time that no number of GPUs can shorten."""

    prompt_tokens: float
    mean_new_tokens: float
    longest_new_tokens: float

    @property
    def mean_tokens(self) -> float:
        return self.prompt_tokens + self.mean_new_tokens


def longest_possible(config: LibraConfig) -> Lengths:
    """Every trajectory fills max_model_len: what is known before anything was generated."""
    prompt = config.max_model_len - config.max_new_tokens
    return Lengths(prompt, config.max_new_tokens, config.max_new_tokens)
