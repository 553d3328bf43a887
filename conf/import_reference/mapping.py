"""The table: what becomes of every option of the published system that has a counterpart in Libra.

`conf/import_reference/dropped.py` holds the options that have none. A test demands that every name of
`published.DEFAULTS` is in exactly one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conf.import_reference import computed
from conf.import_reference.dropped import DROPPED
from conf.import_reference.rules import OPTIONS, Rule, at_least, one_of, only, same, timeout, to

PLANNER = "global_resource_planner"

CORE: dict[str, Rule] = {
    "model_path": same,
    "tokenizer_path": same,
    "train_backend": only("megatron_core", "Libra trains with Megatron-Core only"),
    "train_gpus": same,
    "rollout_gpus": same,
    "train_tp_size": computed.train_tp,
    "tp_size": computed.tp,
    "train_dp_size": computed.train_dp,
    "train_pp_size": same,
    "train_cp_size": same,
    "vllm_tp_size": computed.rollout_tp,
    "gpus_per_node_override": computed.gpus_per_node,
    "batch_size": same,
    "micro_batch_size": same,
    "n_samples": same,
    "max_model_len": computed.context_length,
    "max_seq_length": computed.context_length,
    "max_new_tokens": same,
    "max_concurrent_rollouts": computed.concurrency,
    "max_head_offpolicyness": same,
    "recompute_logprobs": same,
    "recompute_micro_batch_size": at_least(1),
    "total_steps": same,
    "learning_rate": same,
    "temperature": same,
    "top_p": same,
    "seed": same,
    "kl_coef": to("algorithm.kl_coef"),
    "clip_epsilon": to("algorithm.clip_low", "algorithm.clip_high"),
    "megatron_use_precision_aware_optimizer": same,
    "megatron_optimizer_cpu_offload": computed.cpu_offload,
    "megatron_optimizer_offload_fraction": same,
    "megatron_use_cpu_initialization": same,
    "megatron_grouped_gemm": same,
    "phase_trace_enabled": same,
    "phase_trace_dir": to("trace.directory"),
}

WEIGHTS: dict[str, Rule] = {
    "sync_interval": computed.sync_interval,
    "rollout_weight_sync_mode": only(
        "restart",
        "with none, versions were counted while the servers kept their first weights; other modes are not built here",
    ),
    "rollout_weight_reload_method": one_of(
        ("restart", "inplace"), "inplace", "the published system refuses it as well"
    ),
    "rollout_weight_reload_strategy": one_of(
        ("parallel", "serial"), "parallel", "the published system refuses it as well"
    ),
    "rollout_weight_sync_timeout_s": timeout("weights.refresh_timeout_s"),
    "keep_latest_checkpoints": computed.kept_versions,
}

ROLLOUT: dict[str, Rule] = {
    "instances[].tp": computed.instance_tp,
    "max_model_len": computed.context_length,
    "gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    "startup_timeout": computed.ready_timeout,
}

PLANNING: dict[str, Rule] = {
    "memory_budget_check_enabled": same,
    "memory_budget_dry_run_enabled": same,
    "memory_budget_safety_margin_bytes": at_least(0),
    "memory_budget_logits_dtype_bytes": at_least(1),
    "memory_budget_workspace_factor": at_least(1),
    "initial_allocation_strategy": computed.strategy,
    "allocation_granularity_gpus": same,
    "min_train_gpus": at_least(1),
    "min_rollout_gpus": at_least(1),
    "allowed_train_tp": same,
    "allowed_train_ep": same,
    "allowed_train_pp": same,
    "train_comm_compute_ratio_threshold": same,
    "train_ep_comm_compute_ratio_threshold": same,
    "train_pipeline_bubble_ratio_threshold": same,
    "runtime_dynamic_reconfiguration_enabled": same,
    "runtime_online_replanning": same,
    "runtime_manage_rollout_processes": same,
    "runtime_rollout_reconfigure_strategy": same,
    "runtime_cluster_swap_enabled": same,
    "runtime_reconfigure_training": same,
    "runtime_training_pool_plan_only": same,
    "decouple_communication_domains": same,
    "elastic_hybrid_replica_size_gpus": same,
    "elastic_hybrid_min_rollout_gpus": same,
    "runtime_batch_collection_timeout_s": timeout(f"{PLANNER}.runtime_batch_collection_timeout_s"),
    "runtime_batch_collection_max_retries": same,
    "runtime_drain_before_reconfigure": same,
    "vllm_ready_timeout_s": computed.ready_timeout,
    "vllm_stop_timeout_s": timeout("rollout.stop_timeout_s"),
}

HARDWARE: dict[str, Rule] = {
    "flops_peak": to("hardware.gpu_flops"),
    "mem_bw": to("hardware.gpu_memory_bytes_per_s"),
    "mem_capacity": to("hardware.gpu_memory_bytes"),
    "bw_intra_node": computed.link,
    "bw_inter_node": computed.network,
    "gpus_per_node": computed.gpus_per_node,
}

MODEL_ARCH: dict[str, Rule] = {
    "d_model": to("model.hidden_size"),
    "n_layers": to("model.num_hidden_layers"),
    "n_heads": to("model.num_attention_heads"),
    "n_kv_heads": to("model.num_key_value_heads"),
    "vocab_size": to("model.vocab_size"),
    "intermediate_size": to("model.intermediate_size"),
    "head_dim": computed.head_dim,
    "num_experts": computed.experts("model.num_experts"),
    "num_activated_experts": computed.experts("model.num_experts_per_tok"),
    "expert_intermediate_size": computed.experts("model.moe_intermediate_size"),
}


def _below(section: str, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    return {f"{section}.{name}": rule for name, rule in rules.items()}


MAPPED: dict[str, Rule] = {
    **CORE,
    **WEIGHTS,
    **_below("heterogeneous_rollout", ROLLOUT),
    **_below(PLANNER, PLANNING),
    **_below("hardware", HARDWARE),
    **_below("model_arch", MODEL_ARCH),
}

DEPRECATED = frozenset({f"{PLANNER}.elastic_hybrid_max_workers"})
FOLLOWED: dict[str, Rule] = {name: same for name in DROPPED if name in OPTIONS and name not in DEPRECATED}
"""Options that Libra has come to declare under the published name since the reasons were written."""

TABLE: dict[str, Rule] = {**DROPPED, **FOLLOWED, **MAPPED}
"""By published name."""

WRITTEN_DEFAULTS = (
    "train_gpus",
    "rollout_gpus",
    "train_tp_size",
    "vllm_tp_size",
    "batch_size",
    "micro_batch_size",
    "n_samples",
    "max_seq_length",
    "max_new_tokens",
    "max_concurrent_rollouts",
    "max_head_offpolicyness",
    "recompute_logprobs",
    "recompute_micro_batch_size",
    "total_steps",
    "learning_rate",
    "temperature",
    "top_p",
    "seed",
    "sync_interval",
    "kl_coef",
    "clip_epsilon",
    f"{PLANNER}.initial_allocation_strategy",
)
"""Options whose published default decides what is computed and with what: written out when the input leaves them open."""

SECTION_DEFAULTS = {
    "hardware": ("flops_peak", "mem_bw", "mem_capacity", "bw_intra_node", "bw_inter_node", "gpus_per_node"),
    "model_arch": ("d_model", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "intermediate_size"),
}
"""The same for a section of which the input gives a part."""

ENGINE: dict[str, Any] = {
    "algorithm.normalize_advantage": True,
    "algorithm.drop_uniform_groups": False,
    "algorithm.overlong_buffer_tokens": 0,
    "algorithm.adam_beta1": 0.9,
    "algorithm.adam_beta2": 0.95,
    "algorithm.adam_eps": 1e-8,
    "algorithm.weight_decay": 0.01,
    "algorithm.clip_grad_norm": 1.0,
    "algorithm.lr_schedule": "constant",
    "algorithm.lr_warmup_steps": 0,
}
"""What the published engine has fixed in its code: no option there, but options here."""
