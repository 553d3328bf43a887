"""The one validator of planner and launcher: every rule that needs no machine, all problems at once."""

from __future__ import annotations

import math
from typing import Any

from conf.options import Option, declared, walk
from conf.pending import pending_problems
from conf.schema import LibraConfig


def option_problems(config: LibraConfig) -> list[str]:
    """Values outside the range or the choices that the schema declares."""
    options = declared(LibraConfig)
    found = (out_of_range(options[name], value) for name, _, value in walk(config))
    return [problem for problem in found if problem]


def out_of_range(option: Option, value: Any) -> str:
    """Why `value` is not allowed for `option`, or "". For a list, the first element that is not."""
    if isinstance(value, list):
        return next((problem for element in value if (problem := out_of_range(option, element))), "")
    name, unit = option.name, f" {option.unit}" if option.unit else ""
    if option.choices and value not in option.choices:
        wanted = ", ".join(repr(choice) for choice in option.choices if choice)
        return f"{name}={value!r} is not one of {wanted}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return f"{name}={value} is not a finite number"
    if option.above is not None and value <= option.above:
        return f"{name}={value} is not above {option.above:g}{unit}"
    if option.minimum is not None and value < option.minimum:
        return f"{name}={value} is below the least allowed, {option.minimum:g}{unit}"
    if option.maximum is not None and value > option.maximum:
        return f"{name}={value} is above the most allowed, {option.maximum:g}{unit}"
    return ""


def cross_problems(config: LibraConfig) -> list[str]:
    """Options that contradict each other; each sentence names wanted, given and what to change."""
    rules = (
        (
            config.batch_size % config.n_samples != 0,
            f"batch_size={config.batch_size} is not a multiple of n_samples={config.n_samples}: a step trains whole groups; change one of them",
        ),
        (
            config.max_new_tokens >= config.max_model_len,
            f"max_new_tokens={config.max_new_tokens} leaves no room for a prompt in max_model_len={config.max_model_len}; lower max_new_tokens",
        ),
        (
            config.max_head_offpolicyness < config.sync_interval - 1,
            f"max_head_offpolicyness={config.max_head_offpolicyness} is below sync_interval - 1 = {config.sync_interval - 1}: with weights"
            " synced that rarely no trajectory would be fresh enough; raise max_head_offpolicyness or lower sync_interval",
        ),
        (
            config.max_concurrent_rollouts < config.n_samples,
            f"max_concurrent_rollouts={config.max_concurrent_rollouts} is below n_samples={config.n_samples}: no group could be in flight; raise it",
        ),
        (
            config.batch_size
            < config.train_gpus // max(1, config.train_tp_size * config.train_pp_size * config.train_cp_size),
            f"batch_size={config.batch_size} is smaller than the data-parallel degree; lower train_gpus or raise batch_size",
        ),
        (
            config.weights.probe_tokens > config.max_model_len - 1,
            f"weights.probe_tokens={config.weights.probe_tokens} does not fit max_model_len={config.max_model_len} with one more token; lower it",
        ),
        (
            config.launch.mode == "local" and not config.launch.follow,
            "launch.follow=false: a local run ends with its launcher, so the launcher has to stay; set launch.follow=true",
        ),
        (
            config.top_p < 1.0,
            f"top_p={config.top_p}: vLLM's log-probs are then those of the nucleus, the trainer's those of the whole distribution,"
            " and their ratio is wrong; only top_p=1.0 is built",
        ),
        (
            config.hardware.device == "cpu" and config.vllm_tp_size > 1,
            f"vllm_tp_size={config.vllm_tp_size}: on hardware.device=cpu one instance is one process; set vllm_tp_size=1",
        ),
    )
    return [text for broken, text in rules if broken]


def problems(config: LibraConfig) -> list[str]:
    return [*option_problems(config), *cross_problems(config), *pending_problems(config)]
