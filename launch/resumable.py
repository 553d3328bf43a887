"""Which options may change when a run goes on, each with the reason: the only place that says so. Pure.

The first rule whose pattern fits an option's name decides; what no rule names stays as it is, because it takes part in what is
trained, and the steps before and after would not be one run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from conf.reference import value_text


@dataclass(frozen=True)
class Rule:
    """`pattern` is an option's name, with * for any rest; `reason` completes "may change: ..." or "may not change: ..."."""

    pattern: str
    may_change: bool
    reason: str


PLANNER = "global_resource_planner"
PLACES = "it says where and how the run is carried out, not what is trained"
LAYOUT = "the checkpoint is divided over the trainer's ranks as the run was laid out; going on with another layout comes later"
PROMPTS = "the ledger counts prompts of this task and seed; with others their numbers would mean something else"
BATCHES = "recorded batches have that size, and the steps before and after would not be one run"
RULES: tuple[Rule, ...] = (
    Rule(
        "total_steps",
        True,
        "the run ends earlier or later; a learning rate that falls towards the end is stretched with it",
    ),
    Rule("learning_rate", True, "it counts from the step that is resumed from"),
    Rule("save_interval", True, "it says when checkpoints are made"),
    Rule("keep_latest_checkpoints", True, "it says how many checkpoints are kept"),
    Rule("micro_batch_size", True, "it changes memory, never the result"),
    Rule("recompute_micro_batch_size", True, "it changes memory, never the result"),
    Rule("max_concurrent_rollouts", True, "it bounds what is in flight; staleness has its own bound"),
    Rule("rollout_weight_reload_method", True, "every load is proved in the same way"),
    Rule("rollout_weight_reload_strategy", True, "every load is proved in the same way"),
    Rule("phase_trace_enabled", True, "it says what is recorded"),
    Rule("trace.*", True, "it says what is recorded"),
    Rule("algorithm.step_timeout_s", True, "it is a deadline"),
    Rule("rollout.dtype", False, "sampled log-probs would come from another number format than before"),
    Rule("rollout.*", True, "it says how servers are run; that they serve the right weights is proved at every load"),
    Rule("weights.dtype", False, "rollouts would come from another number format than before"),
    Rule("weights.*", True, "it says how weights travel; that they arrive is proved at every load"),
    Rule("hardware.device", False, "the numbers of a CPU and of a GPU are not the same"),
    Rule(
        "hardware.*", True, "it describes the nodes, which another partition may have others of; the layout has to stay"
    ),
    Rule("slurm.*", True, PLACES),
    Rule(
        "launch.run_dir", False, "a run goes on where it is; a new one from the same options is made by --config-path"
    ),
    Rule("launch.replace_finished", False, "a run that goes on is not moved aside"),
    Rule("launch.explain", False, "it is a question to `python -m launch`"),
    Rule("launch.*", True, PLACES),
    Rule(f"{PLANNER}.runtime_batch_collection_*", True, "it is a deadline"),
    Rule(f"{PLANNER}.memory_budget_*", True, "it takes part in estimates only; the layout has to stay"),
    Rule("train_gpus", False, LAYOUT),
    Rule("train_*_size", False, LAYOUT),
    Rule("rollout_gpus", False, LAYOUT),
    Rule("vllm_tp_size", False, LAYOUT),
    Rule(f"{PLANNER}.*", False, LAYOUT),
    Rule("megatron_optimizer_*", True, "a checkpoint saved with one offload is gone on from with another"),
    Rule("megatron_use_cpu_initialization", True, "the weights come from the checkpoint"),
    Rule("megatron_*", False, "the optimizer's state in the checkpoint is of that kind"),
    Rule("train_dtype", False, "the state in the checkpoint is of that kind"),
    Rule("task.*", False, PROMPTS),
    Rule("seed", False, PROMPTS),
    Rule("batch_size", False, BATCHES),
    Rule("n_samples", False, BATCHES),
    Rule("model_path", False, "the checkpoint is of that model"),
    Rule("tokenizer_path", False, "recorded token ids are of that tokenizer"),
    Rule("model.*", False, "the checkpoint is of that model"),
    Rule("warmup.*", False, "the starter policy was made before the first step"),
)
OTHERWISE = Rule("*", False, "it takes part in what is trained: the steps before and after would not be one run")


def rule_for(name: str) -> Rule:
    return next((rule for rule in RULES if fnmatchcase(name, rule.pattern)), OTHERWISE)


@dataclass(frozen=True)
class Change:
    """One option that is to differ from the run's config.yaml."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name}: {value_text(self.before)} -> {value_text(self.after)}"


def refusals(changes: Iterable[Change]) -> list[str]:
    """A sentence for each change that may not be."""
    return [
        f"{change.name}={value_text(change.after)} may not change when a run goes on (it is {value_text(change.before)}):"
        f" {rule.reason}"
        for change in changes
        if not (rule := rule_for(change.name)).may_change
    ]
