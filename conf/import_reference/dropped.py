"""Options of the published system without a counterpart in Libra, each with the reason.

Reasons are of four kinds: it had no effect there either, it belonged to the old launcher, it is deprecated, or what it
needs is not built here yet (then the sentence is that of `conf/pending.py` where there is one).
"""

from __future__ import annotations

from conf.import_reference.published import DEFAULTS
from conf.import_reference.rules import OPTIONS, Kind, Outcome, Published, Rule, drop
from conf.pending import pending

PLANNER = "global_resource_planner"
NO_EFFECT = "no effect in the published system either"
RUN_DIRECTORY = "the run directory holds it (launch.run_dir)"
LAUNCHER = "the launcher sees to it: it places the steps, chooses ports and tells them to one another"
SIZES = "counted from the sizes of the model"
MOE = "training of mixture-of-experts models is not built yet"
SCHEDULING = (
    "routing by length over instances of different sizes is not built here yet; the least busy instance is taken"
)
NCCL = "weights travel through files in the run directory; NCCL and HCCL transport are not built here"
SERVERS = "Libra starts, watches and stops its vLLM servers itself"
AGENTS = "workflows with tools are not built here yet"
CHECKPOINTS = (
    "checkpoints have Libra's own form; every published version of the weights is a HF folder as well"
    if "save_interval" in OPTIONS
    else "every published version of the weights is a HF folder; checkpoints to resume from are not built here yet"
)
SIMULATORS = "Libra predicts from the bounds of the hardware; it calls no external simulator"
TRACING = (
    "spans of all roles are written when phase_trace_enabled is true; `python -m traces export` makes the Chrome trace"
)


def sentence(option: str, otherwise: str) -> str:
    """What `conf/pending.py` says about an option, while it is there."""
    return pending().get(option, otherwise)


MOVING = sentence(f"{PLANNER}.runtime_reconfigure_training", "Libra decides about moves of GPUs in its own way")
REPLANNING = sentence(f"{PLANNER}.runtime_online_replanning", "Libra decides when to plan again in its own way")
OTHERS_SERVERS = sentence(f"{PLANNER}.runtime_manage_rollout_processes", SERVERS)


def planner_switch(view: Published, name: str) -> Outcome:
    why = "Libra always plans before a launch; global_resource_planner.initial_allocation_strategy says what it may choose"
    return Outcome(Kind.DROPPED, why=f"{why}; {MOVING}" if view.switch(name) else why)


def endpoints(view: Published, name: str) -> Outcome:
    return Outcome(Kind.DROPPED, why=OTHERS_SERVERS if view[name] else SERVERS)


def one(why_not: str) -> Rule:
    """1 is what Libra does; anything else is not built."""

    def rule(view: Published, name: str) -> Outcome:
        return Outcome(Kind.DROPPED, why="1 is what Libra does" if view.number(name) == 1 else why_not)

    return rule


REASONS: dict[str, tuple[str, ...]] = {
    NO_EFFECT: (
        "gamma",
        "profiling.rho_memory_bound",
        "heterogeneous_rollout.scheduling.adaptive_routing",
        "heterogeneous_rollout.scheduling.request_timeout",
        "heterogeneous_rollout.scheduling.cmlfq_migration_profile_path",
        "heterogeneous_rollout.scheduling.cmlfq_default_bucket",
        f"{PLANNER}.runtime_reconfiguration_coord_dir",
        f"{PLANNER}.runtime_rollout_drain_grace_s",
    ),
    "deprecated and ignored there too": (f"{PLANNER}.elastic_hybrid_max_workers",),
    "vLLM is the only engine": ("rollout_backend",),
    "always on in Libra": ("use_distributed_optimizer", "megatron_grad_reduce_in_fp32"),
    "not used by Libra's trainer, which changes memory and speed but no result": (
        "sequence_parallel",
        "megatron_optimizer_pin_cpu_grads",
        "megatron_optimizer_pin_cpu_params",
        "megatron_use_transformer_engine",
    ),
    "activations are not recomputed here yet, so that long trajectories need more memory": (
        "megatron_recompute_num_layers",
    ),
    "there is one pipeline schedule, and it is the one that the published system allowed": (
        "pipeline_schedule",
        "virtual_pipeline_model_parallel_size",
    ),
    CHECKPOINTS: (
        "save_interval",
        "megatron_checkpoint_format",
        "megatron_fully_parallel_save",
        "megatron_async_save",
    ),
    "every rank writes its own part of each version; there is no other export": (
        "megatron_streaming_export",
        "rollout_weight_sync_export_only",
    ),
    "held-out problems are answered before and after training (launch.evaluate), not in between yet": (
        "eval_interval",
    ),
    "what is in flight is bounded by max_concurrent_rollouts and max_head_offpolicyness alone": ("queue_size",),
    "always required: a version that is not loaded and proved in time ends the run": ("require_rollout_weight_sync",),
    TRACING: ("enable_rollout_tracing", "enable_chrome_trace", "chrome_trace_output_dir"),
    RUN_DIRECTORY: ("sync_path", "rollout_weight_sync_control_dir", "log_dir"),
    "metrics.jsonl in the run directory holds every step; wandb is not built here yet": (
        "wandb_project",
        "wandb_run_name",
    ),
    "the newest batches (weights.keep_batches) and the metrics of every step stay in the run directory": (
        "enable_history_collection",
        "history_output_dir",
        "history_save_raw_lengths",
        "history_flush_interval",
        "history_experiment_name",
    ),
    NCCL: (
        "weight_sync_mode",
        "rollout_nccl_host",
        "rollout_nccl_port",
        "rollout_nccl_chunk_mb",
        "rollout_nccl_rate_limit_gbps",
        "rollout_weight_sync_poll_interval_s",
        "rollout_hccl_host",
        "rollout_hccl_port",
        "rollout_hccl_packed_buffer_mb",
        "rollout_hccl_num_buffers",
    ),
    AGENTS: ("r2e_max_turns", "r2e_max_prompt_tokens", "r2e_stop_reward"),
    "the prompt is what the task makes of it": ("heterogeneous_rollout.enable_thinking",),
    "problems and rewards come from a task (group task)": ("dataset_name", "dataset_split"),
    "there is no Ray": ("ray_address",),
    LAUNCHER: (
        "master_addr",
        "master_port",
        "rollout_gpu_ids",
        "num_nodes",
        "train_gpus_per_node",
        "rollout_gpus_per_node",
        "n_total_gpus",
        "heterogeneous_rollout.available_gpus",
        "heterogeneous_rollout.gpu.available_gpus",
        "heterogeneous_rollout.instances[].instance_id",
        "heterogeneous_rollout.instances[].gpus",
        "heterogeneous_rollout.instances[].description",
        "heterogeneous_rollout.instances[].host",
        "heterogeneous_rollout.instances[].port",
    ),
    "rollout_gpus says it, and vllm_tp_size divides it into instances": (
        "vllm_num_instances",
        "heterogeneous_rollout.enabled",
        "heterogeneous_rollout.instances",
        "heterogeneous_rollout.total_gpus",
        "heterogeneous_rollout.gpu.total_gpus",
    ),
    SERVERS: (
        "vllm_host",
        "vllm_port",
        "heterogeneous_rollout.vllm_host",
        "heterogeneous_rollout.vllm_base_port",
        f"{PLANNER}.vllm_launch_command_template",
        f"{PLANNER}.vllm_stop_command_template",
        f"{PLANNER}.runtime_adopt_existing_rollout_processes",
        f"{PLANNER}.runtime_wait_rollout_process_start_ready",
        f"{PLANNER}.runtime_post_rollout_stop_grace_s",
        f"{PLANNER}.runtime_rollout_log_dir",
        f"{PLANNER}.runtime_rollout_manifest_path",
        f"{PLANNER}.runtime_rollout_pid_registry_path",
    ),
    SIZES: ("model_arch.num_params", "model_arch.active_num_params", "model_arch.is_moe"),
    "weights are published in weights.dtype and generated with in rollout.dtype": ("model_arch.dtype_bytes",),
    "the supported mixtures of experts have no shared expert": (
        "model_arch.num_shared_experts",
        "model_arch.shared_expert_intermediate_size",
    ),
    "latencies are not part of Libra's bounds": ("hardware.tp_comm_overhead", "hardware.latency_inter_node"),
    "with initial_allocation_strategy=configured the split is train_gpus and rollout_gpus": (
        f"{PLANNER}.fixed_train_gpus",
    ),
    "says only that the file is what the planner had chosen": (f"{PLANNER}.initial_allocation_applied",),
    "the micro-batch is micro_batch_size; it is not searched": (f"{PLANNER}.micro_batch_sizes",),
    "all rollout instances have vllm_tp_size": (
        f"{PLANNER}.allowed_rollout_tp",
        f"{PLANNER}.rollout_node_tp_pattern",
        f"{PLANNER}.require_heterogeneous_rollout_tp",
    ),
    "a plan is made from the configuration, not from recorded lengths": (
        f"{PLANNER}.startup_profile_enabled",
        f"{PLANNER}.startup_profile_sample_size",
        f"{PLANNER}.startup_profile_strategy",
        f"{PLANNER}.startup_profile_seed",
        f"{PLANNER}.startup_profile_samples_per_prompt",
        f"{PLANNER}.startup_profile_dataset_jsonl",
        f"{PLANNER}.startup_profile_history_jsonl",
        f"{PLANNER}.startup_profile_summary_json",
        f"{PLANNER}.startup_profile_reuse_existing",
        f"{PLANNER}.startup_profile_allow_synthetic_fallback",
        f"{PLANNER}.runtime_length_profile_enabled",
        f"{PLANNER}.runtime_length_profile_jsonl",
    ),
    "the plan, its rivals and every rejected branch are in plan.json": (f"{PLANNER}.verbose",),
    REPLANNING: (
        f"{PLANNER}.plan_interval",
        f"{PLANNER}.warmup_steps",
        f"{PLANNER}.min_history_size",
        f"{PLANNER}.max_history_size",
        f"{PLANNER}.min_gain_ratio",
        f"{PLANNER}.reconfiguration_cost_s",
        f"{PLANNER}.apply_to_runtime",
        f"{PLANNER}.runtime_async_planning",
        f"{PLANNER}.runtime_max_pending_plans",
        f"{PLANNER}.runtime_replan_cooldown_steps",
        f"{PLANNER}.runtime_queue_pressure_threshold",
        f"{PLANNER}.runtime_active_rollout_pressure_threshold",
        f"{PLANNER}.runtime_rejected_rollout_delta_threshold",
        f"{PLANNER}.runtime_rollout_train_imbalance_threshold",
    ),
}
"""Reason -> published names. Whole families are added below, by the beginnings of their names."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "constants of a cost model that Libra does not have": ("profiling.",),
    SCHEDULING: ("heterogeneous_rollout.scheduling.",),
    SIMULATORS: (
        f"{PLANNER}.simulator_",
        f"{PLANNER}.sailor_",
        f"{PLANNER}.vidur_",
        f"{PLANNER}.train_backend",
        f"{PLANNER}.rollout_backend",
    ),
    MOVING: (
        f"{PLANNER}.runtime_drain_timeout_s",
        f"{PLANNER}.runtime_prewarm_",
        f"{PLANNER}.runtime_training_pool_",
        f"{PLANNER}.runtime_use_nccl_barrier_",
        f"{PLANNER}.runtime_coordinate_",
        f"{PLANNER}.runtime_peer_request_wait_s",
        f"{PLANNER}.hybrid_",
        f"{PLANNER}.elastic_hybrid_",
        f"{PLANNER}.gradient_",
        f"{PLANNER}.native_rdma_",
    ),
}

SPECIAL: dict[str, Rule] = {
    "vllm_endpoints": endpoints,
    "ppo_epochs": one("a batch is trained once; several passes over it are not built here yet"),
    "train_ep_size": one(MOE),
    "expert_tensor_parallel_size": one(MOE),
    f"{PLANNER}.enabled": planner_switch,
}


def _table() -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for why, beginnings in FAMILIES.items():
        found |= {name: drop(why) for name in DEFAULTS if name.startswith(beginnings)}
    for why, names in REASONS.items():
        found |= {name: drop(why) for name in names}
    return found | SPECIAL


DROPPED = _table()
"""By published name. `mapping.TABLE` puts what it maps above the families."""
