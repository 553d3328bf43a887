"""Options whose capability is not built yet: declared, checked and documented, and refused by name when they are set.

The list only ever shrinks: a test compares it with the number below.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conf.options import declared
from conf.schema import LibraConfig

PLANNER = "global_resource_planner"
MOST_PENDING = 20
"""Lower it whenever an entry leaves; never raise it."""


@dataclass(frozen=True)
class Capability:
    """Something that Libra will do; `sentence` ends the refusal of each of its options."""

    sentence: str
    options: tuple[str, ...]


CAPABILITIES = (
    Capability(
        "moving GPUs between training and rollout while a run goes on is not built yet",
        (
            f"{PLANNER}.runtime_dynamic_reconfiguration_enabled",
            f"{PLANNER}.runtime_rollout_reconfigure_strategy",
            f"{PLANNER}.runtime_cluster_swap_enabled",
            f"{PLANNER}.runtime_reconfigure_training",
            f"{PLANNER}.runtime_training_pool_plan_only",
            f"{PLANNER}.runtime_drain_before_reconfigure",
            f"{PLANNER}.decouple_communication_domains",
            f"{PLANNER}.elastic_hybrid_replica_size_gpus",
            f"{PLANNER}.elastic_hybrid_min_rollout_gpus",
        ),
    ),
    Capability(
        "planning again from measurements of the run is not built yet", (f"{PLANNER}.runtime_online_replanning",)
    ),
    Capability(
        "using vLLM servers that somebody else started is not built yet",
        (f"{PLANNER}.runtime_manage_rollout_processes",),
    ),
    Capability(
        "pipeline-parallel training is not built yet",
        ("train_pp_size", f"{PLANNER}.allowed_train_pp", f"{PLANNER}.train_pipeline_bubble_ratio_threshold"),
    ),
    Capability("context-parallel training is not built yet", ("train_cp_size",)),
    Capability(
        "training of mixture-of-experts models is not built yet",
        ("megatron_grouped_gemm", f"{PLANNER}.allowed_train_ep", f"{PLANNER}.train_ep_comm_compute_ratio_threshold"),
    ),
    Capability(
        "the precision-aware optimizer needs Transformer Engine, which the trainer does not use yet",
        ("megatron_use_precision_aware_optimizer",),
    ),
    Capability("the memory probe before training is not built yet", (f"{PLANNER}.memory_budget_dry_run_enabled",)),
)

PLANNED_ONLY = {"Qwen3MoeForCausalLM": "training of mixture-of-experts models is not built yet"}
"""Architectures that can be planned (a dry run) but not started."""


def pending() -> dict[str, str]:
    """Every pending option with the sentence about its capability."""
    return {name: capability.sentence for capability in CAPABILITIES for name in capability.options}


def pending_problems(config: LibraConfig) -> Iterator[str]:
    """One refusal for each pending option that is set to anything but its default."""
    options = declared(LibraConfig)
    for name, sentence in pending().items():
        value, default = value_of(config, name), options[name].default
        if value != default:
            yield f"{name}={_as_typed(value)}: {sentence}; leave it at {_as_typed(default)}"


def value_of(config: LibraConfig, name: str) -> Any:
    """The value of the option with this dotted name."""
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _as_typed(value: Any) -> str:
    """true, null and [2], as on a command line, where Python says True, None and [2]."""
    return value if isinstance(value, str) else json.dumps(value)
