"""How the GPUs are divided between training and generation, and what that means for the configuration."""

from __future__ import annotations

from dataclasses import replace

from conf.schema import LibraConfig
from planner.plan import Plan


def adopt(config: LibraConfig, plan: Plan) -> LibraConfig:
    """`config` with train_gpus, rollout_gpus and train_tp_size as `plan` has them; `config` itself when nothing differs."""
    chosen = {"train_gpus": plan.train.gpus, "rollout_gpus": plan.rollout.gpus, "train_tp_size": plan.train.tp}
    if all(getattr(config, name) == value for name, value in chosen.items()):
        return config
    return replace(config, **chosen)
