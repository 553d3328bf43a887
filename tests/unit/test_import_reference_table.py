"""Every option of the published system has a place in the table, and the doubtful ones the right one."""

from __future__ import annotations

from typing import Any

import pytest

from conf.import_reference.convert import Entry, Imported, convert
from conf.import_reference.dropped import DROPPED, REASONS, SPECIAL
from conf.import_reference.groups import _choices, choose
from conf.import_reference.mapping import ENGINE, MAPPED, SECTION_DEFAULTS, TABLE, WRITTEN_DEFAULTS
from conf.import_reference.published import DEFAULTS
from conf.import_reference.rules import OPTIONS, Kind
from conf.pending import pending
from launch.compose import compose

# As facts about the published system name them: core options, Megatron-Core options, planner options, and what surrounds them.
CORE = """
model_path tokenizer_path train_backend train_gpus rollout_gpus train_tp_size train_pp_size train_cp_size train_dp_size
train_ep_size expert_tensor_parallel_size batch_size micro_batch_size n_samples max_model_len max_new_tokens max_seq_length
max_concurrent_rollouts max_head_offpolicyness queue_size recompute_logprobs recompute_micro_batch_size sync_interval
learning_rate ppo_epochs kl_coef clip_epsilon gamma temperature top_p seed total_steps eval_interval save_interval
keep_latest_checkpoints phase_trace_enabled phase_trace_dir rollout_backend tp_size num_nodes gpus_per_node_override
train_gpus_per_node rollout_gpus_per_node master_addr master_port vllm_host vllm_port vllm_num_instances vllm_endpoints
vllm_tp_size n_total_gpus weight_sync_mode rollout_weight_sync_mode sync_path rollout_weight_sync_control_dir
rollout_weight_sync_timeout_s rollout_weight_sync_export_only rollout_weight_reload_method rollout_weight_reload_strategy
rollout_nccl_host rollout_nccl_port rollout_nccl_chunk_mb rollout_nccl_rate_limit_gbps rollout_weight_sync_poll_interval_s
require_rollout_weight_sync enable_chrome_trace chrome_trace_output_dir log_dir
"""
MEGATRON = """
megatron_use_precision_aware_optimizer megatron_optimizer_cpu_offload megatron_optimizer_offload_fraction
megatron_use_cpu_initialization megatron_grouped_gemm megatron_grad_reduce_in_fp32 use_distributed_optimizer sequence_parallel
megatron_checkpoint_format megatron_fully_parallel_save megatron_async_save megatron_streaming_export
megatron_use_transformer_engine megatron_recompute_num_layers megatron_optimizer_pin_cpu_grads
megatron_optimizer_pin_cpu_params
"""
PLANNER = """
enabled memory_budget_check_enabled memory_budget_dry_run_enabled memory_budget_safety_margin_bytes
memory_budget_logits_dtype_bytes memory_budget_workspace_factor initial_allocation_strategy initial_allocation_applied
allocation_granularity_gpus min_train_gpus min_rollout_gpus allowed_train_tp allowed_train_pp allowed_train_ep
train_comm_compute_ratio_threshold train_ep_comm_compute_ratio_threshold train_pipeline_bubble_ratio_threshold
runtime_dynamic_reconfiguration_enabled runtime_online_replanning runtime_manage_rollout_processes
runtime_rollout_reconfigure_strategy runtime_cluster_swap_enabled runtime_reconfigure_training
runtime_training_pool_plan_only runtime_training_pool_only runtime_training_pool_target_gpus decouple_communication_domains
elastic_hybrid_replica_size_gpus elastic_hybrid_min_rollout_gpus elastic_hybrid_max_workers
runtime_batch_collection_timeout_s runtime_batch_collection_max_retries runtime_drain_before_reconfigure
plan_interval warmup_steps min_history_size min_gain_ratio reconfiguration_cost_s max_history_size allowed_rollout_tp
rollout_node_tp_pattern require_heterogeneous_rollout_tp micro_batch_sizes fixed_train_gpus apply_to_runtime verbose
runtime_async_planning runtime_max_pending_plans runtime_replan_cooldown_steps runtime_queue_pressure_threshold
runtime_active_rollout_pressure_threshold runtime_rejected_rollout_delta_threshold runtime_rollout_train_imbalance_threshold
runtime_drain_timeout_s runtime_prewarm_no_spare_fallback_strategy runtime_adopt_existing_rollout_processes
runtime_wait_rollout_process_start_ready runtime_post_rollout_stop_grace_s runtime_coordinate_reconfiguration_ranks
runtime_coordinate_batch_source_only runtime_peer_request_wait_s runtime_use_nccl_barrier_after_rollout
runtime_use_nccl_barrier_before_weight_sync vllm_ready_timeout_s vllm_stop_timeout_s vllm_launch_command_template
vllm_stop_command_template runtime_rollout_manifest_path runtime_rollout_pid_registry_path runtime_rollout_log_dir
runtime_length_profile_enabled runtime_length_profile_jsonl startup_profile_enabled startup_profile_sample_size
startup_profile_strategy startup_profile_seed startup_profile_samples_per_prompt startup_profile_dataset_jsonl
startup_profile_history_jsonl startup_profile_summary_json startup_profile_reuse_existing
startup_profile_allow_synthetic_fallback elastic_hybrid_planning_enabled elastic_hybrid_require_planner_signal
elastic_hybrid_borrow_train_rollout_ratio elastic_hybrid_release_train_rollout_ratio elastic_hybrid_max_rollout_pressure
elastic_hybrid_join_timeout_s elastic_hybrid_signal_ttl_steps elastic_hybrid_require_isolated_ccl
hybrid_worker_launch_enabled hybrid_worker_ready_timeout_s hybrid_worker_task_dir hybrid_worker_mode
hybrid_lockstep_gradient_sync hybrid_active_gradient_timeout_s hybrid_update_timeout_s hybrid_worker_remote_control_enabled
hybrid_training_prewarm_enabled hybrid_training_prewarm_count hybrid_training_prewarm_worker_ids gradient_transport_backend
gradient_server_host gradient_server_public_host gradient_server_port gradient_server_authkey native_rdma_device
native_rdma_gid_index native_rdma_ib_port native_rdma_max_bytes train_backend rollout_backend simulator_allow_fallback
simulator_timeout_s runtime_reconfiguration_coord_dir runtime_rollout_drain_grace_s
"""
HARDWARE = (
    "flops_peak mem_bw mem_capacity bw_intra_node bw_inter_node gpus_per_node tp_comm_overhead latency_inter_node"
)
MODEL_ARCH = """
num_params d_model n_layers n_heads n_kv_heads vocab_size intermediate_size dtype_bytes head_dim is_moe active_num_params
num_experts num_shared_experts num_activated_experts expert_intermediate_size shared_expert_intermediate_size
"""
PROFILING = """
rho_compute_bound rho_memory_bound theta_slowdown prefill_mfu decode_bw_util prefill_chunk_size kv_frag_rate
act_workspace_bytes train_mem_frag_rate train_workspace_bytes
"""
ROLLOUT = """
max_model_len instances[].tp scheduling.scheduler_type scheduling.load_balance_strategy scheduling.max_queue_length
scheduling.enable_fallback scheduling.adaptive_routing scheduling.request_timeout scheduling.cmlfq_migration_profile_path
scheduling.cmlfq_default_bucket scheduling.la_mlfq_migration_threshold scheduling.cmlfq_tree_persist_interval
scheduling.cmlfq_rebuild_interval
"""


def below(section: str, names: str) -> list[str]:
    return [f"{section}.{name}" for name in names.split()]


NAMED = [
    *CORE.split(),
    *MEGATRON.split(),
    *below("global_resource_planner", PLANNER),
    *below("hardware", HARDWARE),
    *below("model_arch", MODEL_ARCH),
    *below("profiling", PROFILING),
    *below("heterogeneous_rollout", ROLLOUT),
]


def entry(imported: Imported, name: str) -> Entry:
    return next(found for found in imported.entries if found.name == name)


def test_every_option_that_the_facts_name_is_in_the_table() -> None:
    assert len(NAMED) > 200
    assert [name for name in NAMED if name not in TABLE] == []


def test_the_table_and_the_published_options_are_the_same_names() -> None:
    named = {*MAPPED, *SPECIAL, *(name for names in REASONS.values() for name in names)}

    assert set(TABLE) == set(DEFAULTS)
    assert named - set(DEFAULTS) == set()
    assert {*WRITTEN_DEFAULTS, *below("hardware", " ".join(SECTION_DEFAULTS["hardware"]))} <= set(MAPPED)


def test_an_option_has_one_reason_to_be_dropped_and_is_not_mapped_as_well() -> None:
    named = [*MAPPED, *SPECIAL, *(name for names in REASONS.values() for name in names)]

    assert sorted(name for name in set(named) if named.count(name) > 1) == []


def test_no_option_that_libra_has_under_the_same_name_is_dropped_by_the_table() -> None:
    """When something gets built and its option declared, the importer has to follow."""
    static = {name for name in DROPPED if TABLE[name] is DROPPED[name]}

    assert static & set(OPTIONS) == {"global_resource_planner.elastic_hybrid_max_workers"}


def test_weight_folders_are_kept_as_checkpoints_or_as_versions() -> None:
    option = "keep_latest_checkpoints" if "keep_latest_checkpoints" in OPTIONS else "weights.keep_versions"

    assert convert({"keep_latest_checkpoints": 7}).options[option] == 7


def test_constants_of_the_published_engine_are_options_here() -> None:
    assert set(ENGINE) <= set(OPTIONS)


@pytest.mark.parametrize("name", sorted(pending()))
def test_what_is_not_built_is_dropped_with_the_sentence_of_its_capability(name: str) -> None:
    option = OPTIONS[name]
    other: Any = {bool: not option.default, list: [2], str: "restart_all"}.get(type(option.default), 2)

    found = entry(convert({name: other}), name)

    assert found.outcome.kind is Kind.DROPPED
    assert pending()[name] in found.outcome.why


@pytest.mark.parametrize(
    ("settings", "kind", "option", "value"),
    [
        ({"batch_size": 64}, Kind.KEPT, "batch_size", 64),
        ({"kl_coef": 0.01}, Kind.RENAMED, "algorithm.kl_coef", 0.01),
        ({"clip_epsilon": 0.1}, Kind.RENAMED, "algorithm.clip_high", 0.1),
        ({"learning_rate": "1e-6"}, Kind.FIXED, "learning_rate", 1e-6),
        ({"train_gpus": "8"}, Kind.FIXED, "train_gpus", 8),
        ({"train_gpus": 8.0}, Kind.FIXED, "train_gpus", 8),
        ({"recompute_logprobs": "False"}, Kind.FIXED, "recompute_logprobs", False),
        ({"recompute_logprobs": "yes"}, Kind.FIXED, "recompute_logprobs", True),
        ({"recompute_logprobs": 0}, Kind.FIXED, "recompute_logprobs", False),
        ({"sync_interval": 0}, Kind.FIXED, "sync_interval", 1),
        ({"sync_interval": 5}, Kind.KEPT, "sync_interval", 5),
        ({"rollout_weight_sync_mode": "none"}, Kind.FIXED, "rollout_weight_sync_mode", "restart"),
        ({"rollout_weight_sync_mode": "nccl"}, Kind.FIXED, "rollout_weight_sync_mode", "restart"),
        ({"rollout_weight_reload_method": "restart"}, Kind.KEPT, "rollout_weight_reload_method", "restart"),
        ({"rollout_weight_sync_timeout_s": 0}, Kind.FIXED, "weights.refresh_timeout_s", 600.0),
        ({"rollout_weight_sync_timeout_s": 90}, Kind.RENAMED, "weights.refresh_timeout_s", 90),
        ({"recompute_micro_batch_size": 0}, Kind.FIXED, "recompute_micro_batch_size", 1),
        ({"tp_size": 4}, Kind.RENAMED, "train_tp_size", 4),
        ({"model_path": 7}, Kind.FIXED, "model_path", "7"),
        ({"max_seq_length": 4096}, Kind.RENAMED, "max_model_len", 4096),
        ({"heterogeneous_rollout.max_model_len": 9000}, Kind.RENAMED, "max_model_len", 9000),
        ({"max_model_len": 9000}, Kind.FIXED, "max_model_len", 9000),
        ({"hardware.bw_inter_node": 2e11}, Kind.FIXED, "hardware.network_bytes_per_s", 25e9),
        ({"hardware.bw_inter_node": 5e10}, Kind.RENAMED, "hardware.network_bytes_per_s", 5e10),
        ({"hardware.bw_intra_node": 9e11}, Kind.FIXED, "hardware.link_bytes_per_s", 450e9),
        ({"hardware.bw_intra_node": 1.5e11}, Kind.RENAMED, "hardware.link_bytes_per_s", 1.5e11),
        ({"gpus_per_node_override": 4}, Kind.RENAMED, "hardware.gpus_per_node", 4),
        ({"phase_trace_dir": "t"}, Kind.RENAMED, "trace.directory", "t"),
        ({"megatron_optimizer_cpu_offload": True}, Kind.FIXED, "megatron_optimizer_cpu_offload", False),
    ],
)
def test_one_option_arrives_as_it_should(settings: dict[str, Any], kind: Kind, option: str, value: Any) -> None:
    name = next(iter(settings))

    imported = convert(settings)

    assert entry(imported, name).outcome.kind is kind
    assert imported.options[option] == value
    assert type(imported.options[option]) is type(OPTIONS[option].default)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"heterogeneous_rollout.max_model_len": 9000, "max_seq_length": 4000}, 4000),
        ({"heterogeneous_rollout.max_model_len": 4000, "max_seq_length": 9000}, 4000),
        ({"heterogeneous_rollout.max_model_len": 0, "max_seq_length": 9000}, 9000),
        ({"heterogeneous_rollout.max_model_len": 9000, "max_model_len": 4000}, 9000),
        ({"max_seq_length": 9000, "max_model_len": 4000}, 9000),
        ({"heterogeneous_rollout.max_model_len": 0}, 2048),
        ({}, 2048),
    ],
)
def test_the_context_length_is_what_the_published_run_could_use(settings: dict[str, Any], wanted: int) -> None:
    imported = convert(settings)

    assert imported.options["max_model_len"] == wanted


def test_a_context_length_that_was_ignored_is_something_to_look_at() -> None:
    imported = convert({"max_model_len": 4000, "max_seq_length": 9000})

    assert any(line.startswith("max_model_len: the input also has 4000 at top level") for line in imported.todo)


def test_concurrency_is_for_the_whole_run() -> None:
    settings = {"train_gpus": 16, "train_tp_size": 4, "max_concurrent_rollouts": 64}

    assert convert(settings).options["max_concurrent_rollouts"] == 256
    assert convert({**settings, "train_gpus": 4}).options["max_concurrent_rollouts"] == 64
    assert convert({**settings, "train_dp_size": 2}).options["max_concurrent_rollouts"] == 128


def test_equal_instances_give_the_rollout_its_tensor_parallel_size() -> None:
    settings = {
        "heterogeneous_rollout.enabled": True,
        "heterogeneous_rollout.instances[].tp": [4, 4],
        "vllm_tp_size": 1,
    }

    imported = convert(settings)

    assert imported.options["vllm_tp_size"] == 4
    assert entry(imported, "vllm_tp_size").outcome.kind is Kind.FIXED


def test_instances_with_other_gpus_than_rollout_gpus_are_pointed_out() -> None:
    settings = {"heterogeneous_rollout.enabled": True, "heterogeneous_rollout.instances[].tp": [2, 2]}

    assert "rollout_gpus: the instances had 4 GPUs together" in convert({**settings, "rollout_gpus": 8}).todo
    assert not any("rollout_gpus" in line for line in convert({**settings, "rollout_gpus": 4}).todo)


def test_a_file_that_the_published_system_wrote_itself_is_known_to_the_last_key() -> None:
    """Its `to_yaml` writes every option with its default."""
    imported = convert({name: default for name, default in DEFAULTS.items() if default is not None})

    assert imported.unknown == ()
    assert imported.options["batch_size"] == 32
    assert imported.options["train_tp_size"] == 1


def test_different_instances_leave_the_size_to_the_user() -> None:
    imported = convert({"heterogeneous_rollout.enabled": True, "heterogeneous_rollout.instances[].tp": [1, 4]})

    assert imported.options["vllm_tp_size"] == 1
    assert any("they had 1, 4" in line for line in imported.todo)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, "configured"),
        ({"enabled": False, "initial_allocation_strategy": "grp"}, "configured"),
        ({"enabled": "false", "initial_allocation_strategy": "grp"}, "configured"),
        ({"enabled": True}, "grp"),
        ({"enabled": True, "initial_allocation_strategy": "configured"}, "configured"),
        ({"enabled": True, "initial_allocation_strategy": "grp", "initial_allocation_applied": True}, "configured"),
    ],
)
def test_the_planner_divides_the_gpus_only_where_it_did(settings: dict[str, Any], wanted: str) -> None:
    imported = convert({f"global_resource_planner.{name}": value for name, value in settings.items()})

    assert imported.options["global_resource_planner.initial_allocation_strategy"] == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train_gpus", "eight"),
        ("train_gpus", 1.5),
        ("train_gpus", True),
        ("train_gpus", [8]),
        ("max_concurrent_rollouts", "many"),
        ("learning_rate", float("nan")),
        ("recompute_logprobs", "maybe"),
        ("megatron_optimizer_cpu_offload", 7),
        ("model_path", {"a": 1}),
        ("model_path", "???"),
        ("global_resource_planner.allowed_train_tp", 4),
        ("global_resource_planner.allowed_train_tp", ["x"]),
    ],
)
def test_a_value_that_means_nothing_is_dropped_and_has_to_be_set(name: str, value: Any) -> None:
    imported = convert({name: value})

    assert entry(imported, name).outcome.kind is Kind.DROPPED
    assert name not in imported.options
    assert any(line.startswith(f"{name}: ") for line in imported.todo)


def test_a_profile_of_a_known_gpu_becomes_its_file() -> None:
    h100 = {"flops_peak": 990e12, "mem_bw": 3.35e12, "mem_capacity": 80e9, "bw_intra_node": 9e11, "bw_inter_node": 4e11}

    imported = choose(convert({f"hardware.{name}": value for name, value in h100.items()}))

    assert imported.groups["hardware"] == "h100_80g"
    assert [option for option in imported.options if option.startswith("hardware.")] == []


def test_a_slower_network_stays_beside_the_file_of_the_gpu() -> None:
    a800 = {"flops_peak": 312e12, "mem_bw": 2e12, "mem_capacity": 80e9, "bw_intra_node": 4e11, "bw_inter_node": 1e11}

    imported = choose(convert({f"hardware.{name}": value for name, value in a800.items()}))

    assert imported.groups["hardware"] == "a800_80g"
    assert imported.options["hardware.network_bytes_per_s"] == 12.5e9


def test_an_unknown_gpu_and_an_unknown_model_are_written_out() -> None:
    imported = choose(convert({"hardware.flops_peak": 1e15, "model_arch.d_model": 1000}))

    assert {"hardware", "model"} & set(imported.groups) == set()
    assert imported.options["hardware.gpu_flops"] == 1e15
    assert imported.options["model.hidden_size"] == 1000


def test_a_mixture_of_experts_is_not_taken_for_the_dense_model_of_its_widths() -> None:
    moe = {name: value for name, value in _choices("model")["qwen3_30b_a3b"].items()}
    names = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    names |= {"n_kv_heads": "num_key_value_heads", "intermediate_size": "intermediate_size", "vocab_size": "vocab_size"}
    widths = {f"model_arch.{old}": moe[f"model.{new}"] for old, new in names.items()}
    experts = {"is_moe": True, "num_experts": 128, "num_activated_experts": 8, "expert_intermediate_size": 768}

    dense = choose(convert(widths))
    mixture = choose(convert(widths | {f"model_arch.{name}": value for name, value in experts.items()}))

    assert "model" not in dense.groups
    assert mixture.groups["model"] == "qwen3_30b_a3b"


@pytest.mark.parametrize("group", ["hardware", "model", "algorithm"])
def test_group_files_are_read_as_they_compose(group: str) -> None:
    for name, values in _choices(group).items():
        config = compose([f"{group}={name}"])
        composed = {option: getattr(getattr(config, group), option.partition(".")[2]) for option in values}
        assert composed == values
