"""Options that contradict each other: one subject in each module, one contradiction in each function.

A rule yields sentences, each with what is wanted, what is there, and the option to change. Rules never raise: options may
still be outside their own ranges, so a rule guards its divisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conf.schema import LibraConfig
from planner.architecture import Architecture
from planner.conflicts import allocation, batch, fits, hardware, model, optimizer, parallel, rollout, slurm, weights

Rule = Callable[[LibraConfig], Iterator[str]]
ModelRule = Callable[[LibraConfig, Architecture], Iterator[str]]

RULES: tuple[Rule, ...] = (
    *batch.RULES,
    *parallel.RULES,
    *allocation.RULES,
    *hardware.RULES,
    *model.RULES,
    *optimizer.RULES,
    *rollout.RULES,
    *weights.RULES,
    *slurm.RULES,
)
"""What the options alone decide."""

MODEL_RULES: tuple[ModelRule, ...] = fits.RULES
"""What needs the sizes of the model."""
