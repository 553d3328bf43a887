"""The one validator of planner and launcher: every rule that needs no machine, all problems at once."""

from __future__ import annotations

from dataclasses import Field
from typing import Any

from conf.options import walk
from conf.schema import LibraConfig


def option_problems(config: LibraConfig) -> list[str]:
    """Values outside the range or the choices that the schema declares."""
    problems = []
    for name, spec, value in walk(config):
        problem = _out_of_range(name, spec, value)
        if problem:
            problems.append(problem)
    return problems


def _out_of_range(name: str, spec: Field[Any], value: Any) -> str:
    meta = spec.metadata
    unit = f" {meta['unit']}" if meta.get("unit") else ""
    if meta.get("choices") and value not in meta["choices"]:
        wanted = ", ".join(repr(choice) for choice in meta["choices"] if choice)
        return f"{name}={value!r} is not one of {wanted}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    low, high = meta.get("minimum"), meta.get("maximum")
    if value != value or (low is not None and value < low):
        return f"{name}={value} is below the least allowed, {low:g}{unit}"
    if high is not None and value > high:
        return f"{name}={value} is above the most allowed, {high:g}{unit}"
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
    return option_problems(config) + cross_problems(config)
