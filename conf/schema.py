"""Every option of the owner's configuration reference, under its exact name: type, default, unit, range, effect.

Core, Megatron-Core and rollout options are at top level, those of planner, runtime and elasticity under
`global_resource_planner`. Libra's own options are grouped and declared in `conf/sections.py` and `conf/site.py`. Options
whose capability is not built yet are listed in `conf/pending.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conf.options import option
from conf.sections import (
    AlgorithmConfig,
    HardwareConfig,
    ModelConfig,
    RolloutConfig,
    TaskConfig,
    TraceConfig,
    WarmupConfig,
    WeightsConfig,
)
from conf.site import LaunchConfig, SlurmConfig


@dataclass
class GlobalResourcePlannerConfig:
    """Planner, runtime and elastic options."""

    memory_budget_check_enabled: bool = option(
        True, effect="Include recompute-logprobs temporary memory in candidate budgets"
    )
    memory_budget_dry_run_enabled: bool = option(
        False,
        effect="Run one complete recompute-logprobs pass at full length before training, so that memory fails early",
        reason="the probe is not built yet",
    )
    memory_budget_safety_margin_bytes: float = option(
        2e9, effect="Device memory kept outside the analytic estimate", unit="bytes", minimum=0.0
    )
    memory_budget_logits_dtype_bytes: int = option(
        4, effect="Width of one logit in the temporary estimate", unit="bytes", minimum=1, maximum=8
    )
    memory_budget_workspace_factor: float = option(
        1.5, effect="Multiplier for simultaneous logits and workspace temporaries", unit="factor", minimum=1.0
    )
    initial_allocation_strategy: str = option(
        "configured",
        effect="grp lets the planner divide train_gpus + rollout_gpus and choose train_tp_size before launch; configured keeps"
        " train_gpus, rollout_gpus and train_tp_size as given",
        choices=("configured", "grp"),
        reason="what a user types is what runs; predictions are not calibrated by measurements yet",
    )
    allocation_granularity_gpus: int = option(
        1,
        effect="The training side is a multiple of this many GPUs; normally one node or one data-parallel replica",
        unit="GPUs",
        minimum=1,
    )
    min_train_gpus: int = option(1, effect="Least GPUs that train", unit="GPUs", minimum=1)
    min_rollout_gpus: int = option(1, effect="Least GPUs that generate", unit="GPUs", minimum=1)
    allowed_train_tp: list[int] = option(
        factory=list,
        effect="Candidate tensor-parallel sizes of training; empty means 1, 2, 4, 8",
        unit="ranks",
        minimum=1,
    )
    allowed_train_ep: list[int] = option(
        factory=list,
        effect="Candidate expert-parallel sizes of training, for MoE models only; each must divide the number of experts",
        unit="ranks",
        minimum=1,
    )
    allowed_train_pp: list[int] = option(
        factory=list, effect="Candidate pipeline-parallel sizes of training; empty means 1", unit="ranks", minimum=1
    )
    train_comm_compute_ratio_threshold: float | None = option(
        None,
        effect="Prune tensor-parallel sizes whose estimated communication/compute ratio exceeds this; null prunes none",
        unit="ratio",
        above=0.0,
    )
    train_ep_comm_compute_ratio_threshold: float | None = option(
        None,
        effect="Prune expert-parallel sizes whose estimated All-to-All/compute ratio exceeds this; null prunes none",
        unit="ratio",
        above=0.0,
    )
    train_pipeline_bubble_ratio_threshold: float | None = option(
        None,
        effect="Prune pipeline-parallel sizes whose analytical bubble ratio exceeds this; null prunes none",
        unit="ratio",
        above=0.0,
    )
    runtime_dynamic_reconfiguration_enabled: bool = option(
        False, effect="Master switch for changes of the layout while the run goes on"
    )
    runtime_online_replanning: bool = option(False, effect="Use online metrics in planner decisions")
    runtime_manage_rollout_processes: bool = option(
        True,
        effect="Libra starts, stops and adopts rollout processes",
        reason="servers started by others are not built yet",
    )
    runtime_rollout_reconfigure_strategy: str = option(
        "diff",
        effect="Order in which rollout instances are replaced when the layout changes",
        choices=("diff", "restart_all", "blue_green", "prewarm", "cluster_swap"),
    )
    runtime_cluster_swap_enabled: bool = option(
        False, effect="Exchange GPUs between rollout and training without spare GPUs"
    )
    runtime_reconfigure_training: bool = option(False, effect="Change the training pool while the run goes on")
    runtime_training_pool_plan_only: bool = option(
        True, effect="Record changes of the training pool without attaching workers"
    )
    decouple_communication_domains: bool = option(
        True, effect="Keep elastic gradient traffic off the core training DP process group"
    )
    elastic_hybrid_replica_size_gpus: int = option(
        0,
        effect="Physical ranks in one complete TP x EP x PP x CP replica; 0 derives it from the training topology",
        unit="GPUs",
        minimum=0,
    )
    elastic_hybrid_min_rollout_gpus: int = option(
        0, effect="Rollout GPUs that the elastic hybrid pool may never borrow", unit="GPUs", minimum=0
    )
    elastic_hybrid_max_workers: int = option(
        0, effect="Deprecated and ignored: the elastic hybrid pool has no policy maximum", unit="workers", minimum=0
    )
    runtime_batch_collection_timeout_s: float = option(
        600.0,
        effect="Timeout for collecting one training batch",
        unit="s",
        minimum=1.0,
        reason="every wait has an end",
    )
    runtime_batch_collection_max_retries: int = option(
        0, effect="Retries after a batch collection timeout; each waits the timeout again", unit="retries", minimum=0
    )
    runtime_drain_before_reconfigure: bool = option(True, effect="Finish rollouts in flight before the layout changes")


@dataclass
class LibraConfig:
    """The whole configuration of a run."""

    model_path: str = option("", effect="Policy model: a HF folder", unit="path")
    tokenizer_path: str = option("", effect="Tokenizer folder; empty means model_path", unit="path")
    train_backend: str = option("megatron_core", effect="Training backend", choices=("megatron_core",))
    train_gpus: int = option(1, effect="GPUs of the core training pool", unit="GPUs", minimum=1)
    rollout_gpus: int = option(1, effect="GPUs of rollout at launch", unit="GPUs", minimum=1)
    train_tp_size: int = option(1, effect="Tensor-parallel size of training", unit="ranks", minimum=1)
    train_pp_size: int = option(1, effect="Pipeline-parallel size of training", unit="ranks", minimum=1)
    train_cp_size: int = option(1, effect="Context-parallel size of training", unit="ranks", minimum=1)
    vllm_tp_size: int = option(1, effect="Tensor-parallel size of one rollout instance", unit="GPUs", minimum=1)
    batch_size: int = option(512, effect="Trajectories in one optimizer step", unit="trajectories", minimum=1)
    micro_batch_size: int = option(
        4,
        effect="Trajectories in one forward and backward pass; changes memory, never the result",
        unit="trajectories",
        minimum=1,
    )
    n_samples: int = option(8, effect="Rollouts of each prompt (one GRPO group)", unit="trajectories", minimum=2)
    max_model_len: int = option(2048, effect="Context length of vLLM and longest trajectory", unit="tokens", minimum=2)
    max_new_tokens: int = option(1024, effect="Most tokens generated for one rollout", unit="tokens", minimum=1)
    max_concurrent_rollouts: int = option(1024, effect="Most trajectories in flight", unit="trajectories", minimum=1)
    max_head_offpolicyness: int = option(
        1,
        effect="Most optimizer steps between the oldest token of a trajectory and the weights it trains",
        unit="versions",
        minimum=0,
        reason="one step lets generation overlap training",
    )
    recompute_logprobs: bool = option(
        True, effect="Recompute proximal log-probs with the current weights before the update (decoupled PPO)"
    )
    recompute_micro_batch_size: int = option(
        1,
        effect="Trajectories in one pass of recompute-logprobs",
        unit="trajectories",
        minimum=1,
        reason="bounds the memory of the logits",
    )
    total_steps: int = option(100, effect="Optimizer steps of the run", unit="steps", minimum=0)
    save_interval: int = option(
        10,
        effect="Optimizer steps between checkpoints to resume from; 0 saves one only when the run is asked to stop",
        unit="steps",
        minimum=0,
    )
    keep_latest_checkpoints: int = option(
        2,
        effect="Newest checkpoints that are kept, and with them the batches that were trained since",
        unit="checkpoints",
        minimum=1,
        reason="one may turn out to be damaged",
    )
    learning_rate: float = option(1e-6, effect="Peak learning rate", unit="per step", minimum=0.0)
    temperature: float = option(1.0, effect="Sampling temperature of rollouts", unit="factor", minimum=0.01)
    top_p: float = option(
        1.0, effect="Nucleus sampling; 1.0 samples the full distribution", unit="probability", minimum=0.01, maximum=1.0
    )
    seed: int = option(0, effect="Seed of prompts, sampling and training", unit="seed", minimum=0)
    train_dtype: str = option(
        "bfloat16",
        effect="Number format of training computation (master weights are float32)",
        choices=("float32", "bfloat16"),
    )
    megatron_use_precision_aware_optimizer: bool = option(
        False, effect="Keep optimizer-state precision aligned with mixed precision"
    )
    megatron_optimizer_cpu_offload: bool = option(False, effect="Keep optimizer state in host memory and step it there")
    megatron_optimizer_offload_fraction: float = option(
        0.0, effect="Fraction of optimizer state to offload", unit="fraction", minimum=0.0, maximum=1.0
    )
    megatron_use_cpu_initialization: bool = option(
        False, effect="Build model weights in host memory before they move to the GPU"
    )
    megatron_grouped_gemm: bool = option(False, effect="Compute the experts of an MoE layer in one grouped GEMM")
    sync_interval: int = option(1, effect="Training steps between weight sync attempts", unit="steps", minimum=1)
    rollout_weight_sync_mode: str = option(
        "restart",
        effect="restart: one reload request for the complete instance set, whole ACK batch awaited",
        choices=("restart",),
        reason="a run whose rollouts keep their first weights is not reinforcement learning",
    )
    rollout_weight_reload_method: str = option(
        "inplace",
        effect="inplace refreshes resident vLLM workers, restart replaces the server process",
        choices=("restart", "inplace"),
        reason="a restart costs a minute; both are proved in the same way",
    )
    rollout_weight_reload_strategy: str = option(
        "parallel",
        effect="parallel: all instances at once; serial: one at a time on each node",
        choices=("parallel", "serial"),
    )
    phase_trace_enabled: bool = option(
        True, effect="Write phase_trace_rank*.jsonl spans; RL_TRAIN_PHASE_TRACE=1 in the environment turns it on"
    )
    global_resource_planner: GlobalResourcePlannerConfig = field(default_factory=GlobalResourcePlannerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
