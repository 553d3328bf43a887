"""Which options may change when a run goes on, and the sources that its config.yaml keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.dump import dump
from conf.schema import LibraConfig
from conf.typed import options
from launch import pipeline
from launch.config_file import sources_in
from launch.resumable import OTHERWISE, RULES, Change, refusals, rule_for

MAY = [
    "total_steps",
    "learning_rate",
    "save_interval",
    "keep_latest_checkpoints",
    "micro_batch_size",
    "max_concurrent_rollouts",
    "phase_trace_enabled",
    "slurm.time_min",
    "slurm.partition",
    "slurm.account",
    "slurm.layout",
    "launch.follow",
    "launch.setup",
    "launch.stop_grace_s",
    "rollout.max_num_seqs",
    "rollout.gpu_memory_utilization",
    "rollout.extra_args",
    "weights.io_threads",
    "weights.keep_versions",
    "hardware.gpus_per_node",
    "algorithm.step_timeout_s",
    "trace.directory",
    "megatron_optimizer_cpu_offload",
    "global_resource_planner.runtime_batch_collection_timeout_s",
]
MAY_NOT = [
    "seed",
    "batch_size",
    "n_samples",
    "model_path",
    "tokenizer_path",
    "train_gpus",
    "rollout_gpus",
    "train_tp_size",
    "vllm_tp_size",
    "max_model_len",
    "temperature",
    "max_head_offpolicyness",
    "train_dtype",
    "rollout.dtype",
    "weights.dtype",
    "hardware.device",
    "task.name",
    "task.params",
    "algorithm.clip_low",
    "sync_interval",
    "launch.run_dir",
    "launch.replace_finished",
    "warmup.steps",
    "model.hidden_size",
    "recompute_logprobs",
    "global_resource_planner.initial_allocation_strategy",
    "megatron_use_precision_aware_optimizer",
]


@pytest.mark.parametrize("name", MAY)
def test_an_option_that_may_change(name: str) -> None:
    assert name in options()
    assert rule_for(name).may_change


@pytest.mark.parametrize("name", MAY_NOT)
def test_an_option_that_may_not_change_has_a_reason(name: str) -> None:
    assert name in options()
    rule = rule_for(name)

    assert not rule.may_change
    assert len(rule.reason) > 20


def test_every_rule_is_about_an_option_that_exists_and_none_hides_behind_another() -> None:
    deciding = {rule_for(name) for name in options()}

    assert set(RULES) - deciding == set()


@given(st.sampled_from(sorted(options())))
def test_what_no_rule_names_may_not_change(name: str) -> None:
    if rule_for(name) is OTHERWISE:
        assert refusals([Change(name, 1, 2)])


def test_changes_read_as_they_would_be_typed() -> None:
    assert str(Change("slurm.time_min", 60, 720)) == "slurm.time_min: 60 -> 720"
    assert "batch_size=8 may not change when a run goes on (it is 4)" in refusals([Change("batch_size", 4, 8)])[0]


# ---- the sources in config.yaml ------------------------------------------------------------------------------------------


def test_the_sources_of_a_configuration_are_read_back() -> None:
    prepared = pipeline.prepare(["+experiment=demo", 'slurm.job_name="a  # b"', "task.params.x=1"])

    assert sources_in(dump(prepared.config, prepared.sources)) == prepared.sources


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_value_is_taken_for_a_source(value: str, source: str) -> None:
    config = LibraConfig(tokenizer_path=value.replace("\ud800", ""))
    shown = dump(config, {"tokenizer_path": f"s{source}"})

    assert sources_in(shown).get("tokenizer_path", "").startswith("s")
    assert set(sources_in(shown)) == {"tokenizer_path"}
