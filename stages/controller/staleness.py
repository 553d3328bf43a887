"""How many groups may be in flight, and which finished ones may still be trained on. Pure functions.

Batch t is trained on weights v = t. A group that starts while version s is served holds no token older than s, so it is
usable for batch t exactly when t - s <= max_head_offpolicyness =: H. Batches are filled oldest first, so if no more
than (s + H + 1) groups_per_batch groups were ever issued and not dropped while s is served, each of them belongs to a
batch t <= s + H: nothing is generated in order to be thrown away. The counts are cumulative and come from the ledger;
they are never decreased when a batch is consumed (a decrease would loosen the bound by one batch for each version).

No deadlock, also for sync_interval > 1: with s the newest version that is served, the next one comes when the trainer
has done the steps s .. s + sync_interval - 1. They need (s + sync_interval) groups_per_batch groups, no more than the
bound allows, because H >= sync_interval - 1 is checked before a run starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import LibraConfig


class UnusableBoundsError(ValueError):
    """The configured sizes can not make a batch."""


@dataclass(frozen=True)
class Bounds:
    """Counted in groups of n_samples trajectories. `total_groups` is what the whole run needs."""

    groups_per_batch: int
    max_head_offpolicyness: int
    max_groups_in_flight: int
    total_groups: int

    @classmethod
    def of(cls, config: LibraConfig) -> Bounds:
        """Raises UnusableBoundsError when sizes do not fit together."""
        if config.batch_size % config.n_samples:
            raise UnusableBoundsError(
                f"batch_size {config.batch_size} is not a multiple of n_samples {config.n_samples}; "
                f"try batch_size={max(1, round(config.batch_size / config.n_samples)) * config.n_samples}"
            )
        if config.max_concurrent_rollouts < config.n_samples:
            raise UnusableBoundsError(
                f"max_concurrent_rollouts {config.max_concurrent_rollouts} is less than one group of "
                f"n_samples {config.n_samples}; raise max_concurrent_rollouts"
            )
        if config.max_head_offpolicyness < config.sync_interval - 1:
            raise UnusableBoundsError(
                f"max_head_offpolicyness {config.max_head_offpolicyness} starves the trainer between two syncs; "
                f"sync_interval {config.sync_interval} needs at least {config.sync_interval - 1}"
            )
        groups = config.batch_size // config.n_samples
        return cls(
            groups_per_batch=groups,
            max_head_offpolicyness=config.max_head_offpolicyness,
            max_groups_in_flight=config.max_concurrent_rollouts // config.n_samples,
            total_groups=groups * config.total_steps,
        )


def capacity(bounds: Bounds, *, served_version: int, issued: int, dropped: int, in_flight: int) -> int:
    """Groups that may start now. `issued` and `dropped` are cumulative; `served_version` is proved by every instance."""
    allowed = (served_version + bounds.max_head_offpolicyness + 1) * bounds.groups_per_batch
    needed = min(allowed, bounds.total_groups) - (issued - dropped)
    return max(0, min(needed, bounds.max_groups_in_flight - in_flight))


def staleness(step: int, oldest_version: int) -> int:
    """Optimizer steps between the oldest token of a trajectory and the weights v = step that it would train."""
    return step - oldest_version


def is_fresh(bounds: Bounds, step: int, oldest_version: int) -> bool:
    """May a trajectory with this oldest token be consumed by batch `step`? Tested again when a batch is taken."""
    return staleness(step, oldest_version) <= bounds.max_head_offpolicyness


def newest_allowed_step(bounds: Bounds, served_version: int) -> int:
    """The newest batch that groups started under `served_version` may fill."""
    return served_version + bounds.max_head_offpolicyness
