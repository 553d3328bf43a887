"""The learning rate as a pure function of the step, so that a resumed run continues it exactly."""

from __future__ import annotations

import math

from conf.schema import LibraConfig


def learning_rate(step: int, config: LibraConfig) -> float:
    """Rate of optimizer step `step` (from 0): linear rise over lr_warmup_steps, then lr_schedule towards lr_min_ratio.

    The final rate would be reached at step total_steps, so that no step of the run is lost to a rate of 0.
    """
    peak, algorithm = config.learning_rate, config.algorithm
    if step < algorithm.lr_warmup_steps:
        return peak * (step + 1) / algorithm.lr_warmup_steps
    span = max(1, config.total_steps - algorithm.lr_warmup_steps)
    done = min(1.0, (step - algorithm.lr_warmup_steps) / span)
    shapes = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    share = shapes[algorithm.lr_schedule]
    return peak * (algorithm.lr_min_ratio + (1.0 - algorithm.lr_min_ratio) * share)
