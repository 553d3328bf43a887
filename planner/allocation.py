"""How the GPUs are divided between training and generation, and what that means for the configuration."""

from __future__ import annotations

from dataclasses import replace

from conf.schema import LibraConfig
from planner.plan import Plan


def divided(config: LibraConfig, *, train_gpus: int, rollout_gpus: int, train_tp_size: int) -> LibraConfig:
    """`config` with this division; `config` itself when nothing differs."""
    chosen = {"train_gpus": train_gpus, "rollout_gpus": rollout_gpus, "train_tp_size": train_tp_size}
    if all(getattr(config, name) == value for name, value in chosen.items()):
        return config
    return replace(config, train_gpus=train_gpus, rollout_gpus=rollout_gpus, train_tp_size=train_tp_size)


def adopt(config: LibraConfig, plan: Plan) -> LibraConfig:
    """`config` as `plan` divides the GPUs: the same object for initial_allocation_strategy=configured.

    Planning the result again gives the same plan: the search looks at the sum of train_gpus and rollout_gpus only.
    """
    return divided(config, train_gpus=plan.train.gpus, rollout_gpus=plan.rollout.gpus, train_tp_size=plan.train.tp)
