"""Soft overlong punishment: answers that come near the length limit lose reward (Yu et al. 2025, arXiv 2503.14476, eq. 13).

Training rewards only: what the verifier gave stays in the batch, in the metrics and in the evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import LibraConfig
from stages.controller.groups import Completion, FinishedGroup


@dataclass(frozen=True)
class OverlongPunishment:
    """`max_tokens` is the longest answer, `buffer_tokens` the last part of it (the paper's L_cache), in which `penalty` grows.

    A buffer of 0 takes nothing off.
    """

    max_tokens: int
    buffer_tokens: int
    penalty: float

    @classmethod
    def of(cls, config: LibraConfig) -> OverlongPunishment:
        algorithm = config.algorithm
        return cls(config.max_new_tokens, algorithm.overlong_buffer_tokens, algorithm.overlong_penalty)

    def is_overlong(self, answer: Completion) -> bool:
        """The answer reaches into the buffer, or was cut off."""
        return not answer.finished or len(answer.token_ids) > self.max_tokens - self.buffer_tokens

    def taken_off(self, answer: Completion) -> float:
        """Reward that `answer` loses: 0 before the buffer, then linear, `penalty` at its end or when it was cut off."""
        if self.buffer_tokens == 0 or not self.is_overlong(answer):
            return 0.0
        if not answer.finished:
            return self.penalty
        inside = len(answer.token_ids) - (self.max_tokens - self.buffer_tokens)
        return self.penalty * inside / self.buffer_tokens

    def training_rewards(self, group: FinishedGroup) -> list[float]:
        """The rewards that the advantages of `group` are made of."""
        return [
            reward - self.taken_off(answer) for reward, answer in zip(group.rewards, group.completions, strict=True)
        ]
