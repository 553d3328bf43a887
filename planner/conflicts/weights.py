"""The weight exchange: its proof, and the waits around it."""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import LibraConfig


def probe_fits(config: LibraConfig) -> Iterator[str]:
    if config.weights.probe_tokens > config.max_model_len - 1:
        yield (
            f"weights.probe_tokens={config.weights.probe_tokens} does not fit max_model_len={config.max_model_len} with one"
            " more token; lower weights.probe_tokens"
        )


def two_engines_differ(config: LibraConfig) -> Iterator[str]:
    if config.weights.proof_tolerance == 0:
        yield (
            "weights.proof_tolerance=0: trainer and engine never agree to the last bit, so every proof of load would fail;"
            " set weights.proof_tolerance to 1e-3 (float32) or 0.05 (16 bits)"
        )


def new_processes_read_whole_files(config: LibraConfig) -> Iterator[str]:
    if config.weights.delta != "off" and config.rollout_weight_reload_method == "restart":
        yield (
            f"weights.delta={config.weights.delta} does not go with rollout_weight_reload_method=restart: a new server reads whole"
            " files, and deltas have none; set weights.delta=off, or rollout_weight_reload_method=inplace"
        )


def refresh_ends_before_its_step(config: LibraConfig) -> Iterator[str]:
    refresh_s, step_s = longest_refresh_s(config), config.algorithm.step_timeout_s
    if refresh_s > step_s:
        restart = config.rollout_weight_reload_method == "restart"
        parts = "weights.refresh_timeout_s" + (" + rollout.ready_timeout_s + rollout.stop_timeout_s" if restart else "")
        yield (
            f"algorithm.step_timeout_s={step_s:g} is less than the {refresh_s:g} s that a refresh of the weights may take"
            f" ({parts}): the controller would give up first; raise algorithm.step_timeout_s"
        )


def longest_refresh_s(config: LibraConfig) -> float:
    """Deadline of one refresh when no server is missing, as `stages/weights/refresh.py` makes it for parallel reloads."""
    restarts = config.rollout_weight_reload_method == "restart"
    start_s = config.rollout.ready_timeout_s + config.rollout.stop_timeout_s
    return config.weights.refresh_timeout_s + (start_s if restarts else 0.0)


RULES = (probe_fits, two_engines_differ, new_processes_read_whole_files, refresh_ends_before_its_step)
