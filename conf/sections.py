"""Libra's own options, in groups: model, hardware, task, warmup, algorithm, rollout, weights, trace.

`launch` and `slurm` are in `conf/site.py`; `conf/schema.py` puts all of them beside the options of the owner's reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conf.options import option


@dataclass
class ModelConfig:
    """The architecture, as in a HF config.json. Read from `model_path` when that folder exists; needed to plan without it."""

    architecture: str = option(
        "",
        effect="HF architecture; empty reads it from model_path/config.json",
        choices=("", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    )
    num_hidden_layers: int = option(0, effect="Transformer layers; 0 reads config.json", minimum=0, unit="layers")
    hidden_size: int = option(0, effect="Width of the residual stream; 0 reads config.json", minimum=0, unit="elements")
    intermediate_size: int = option(0, effect="Width of the MLP; 0 reads config.json", minimum=0, unit="elements")
    num_attention_heads: int = option(0, effect="Query heads; 0 reads config.json", minimum=0, unit="heads")
    num_key_value_heads: int = option(0, effect="Key/value heads (GQA); 0 reads config.json", minimum=0, unit="heads")
    head_dim: int = option(
        0, effect="Width of one head; 0 means hidden_size / num_attention_heads", minimum=0, unit="elements"
    )
    vocab_size: int = option(0, effect="Rows of the embedding; 0 reads config.json", minimum=0, unit="tokens")
    tie_word_embeddings: bool | None = option(
        None,
        effect="Output head shares the embedding; null reads config.json (false where there is none)",
        unit="switch",
    )
    rope_theta: float | None = option(
        None,
        effect="Base of the rotary embedding; null reads config.json (10000 where there is none)",
        minimum=1.0,
        unit="base",
    )
    max_position_embeddings: int = option(0, effect="Longest position; 0 reads config.json", unit="tokens", minimum=0)
    num_experts: int = option(
        0, effect="Experts of an MoE layer; 0 is a dense model (or reads config.json)", unit="experts", minimum=0
    )
    num_experts_per_tok: int = option(0, effect="Experts that each token visits", unit="experts", minimum=0)
    moe_intermediate_size: int = option(0, effect="Width of one expert's MLP", unit="elements", minimum=0)


@dataclass
class HardwareConfig:
    """One node of the machine. On `device: cpu` a "GPU" is one worker process slot."""

    device: str = option("cuda", effect="Where training and generation run", choices=("cuda", "cpu"))
    gpus_per_node: int = option(8, effect="GPUs (or CPU worker slots) on one node", minimum=1, unit="GPUs")
    cpus_per_node: int = option(96, effect="Logical processors on one node", minimum=1, unit="processors")
    threads_per_core: int = option(
        2,
        effect="Logical processors of one core (lscpu, Slurm's ThreadsPerCore); steps get whole cores",
        minimum=1,
        unit="processors",
        reason="right where a core has two, and costs at most one processor a step where it has one",
    )
    gpu_memory_bytes: float = option(80e9, effect="Memory of one GPU", unit="bytes", minimum=1)
    gpu_flops: float = option(989e12, effect="Peak dense bf16 rate of one GPU", unit="FLOP/s", minimum=1)
    gpu_memory_bytes_per_s: float = option(3.35e12, effect="Memory bandwidth of one GPU", unit="bytes/s", minimum=1)
    link_bytes_per_s: float = option(450e9, effect="GPU to GPU inside a node, one direction", unit="bytes/s", minimum=1)
    network_bytes_per_s: float = option(50e9, effect="Node to node, one direction, per GPU", unit="bytes/s", minimum=1)


@dataclass
class TaskConfig:
    """Where prompts and rewards come from: one class, one YAML file."""

    name: str = option("reasoning_gym", effect="Registered task class (stages/controller/tasks)", unit="name")
    params: dict[str, Any] = option(
        factory=dict, effect="Keyword arguments of the task class", unit="keyword arguments"
    )
    test_size: int = option(200, effect="Held-out problems, never trained on", unit="problems", minimum=1)
    test_samples: int = option(
        4, effect="Answers at temperature 1 to each held-out problem, beside the greedy one", minimum=1, unit="answers"
    )


@dataclass
class WarmupConfig:
    """Supervised steps that make a starter policy when there is none (the demo). 0 steps = use model_path as it is."""

    steps: int = option(0, effect="Most supervised steps; 0 disables the warm-up", minimum=0, unit="steps")
    batch_size: int = option(256, effect="Problems in one supervised step", unit="problems", minimum=1)
    learning_rate: float = option(2e-3, effect="Peak learning rate of the warm-up", minimum=0.0, unit="per step")
    examples: int = option(
        0, effect="Distinct labelled problems to learn from; 0 draws new ones for ever", minimum=0, unit="problems"
    )
    target_reward: float = option(
        0.0,
        effect="Stop early when greedy answers to problems kept apart reach this mean reward; 0 does all steps",
        minimum=0.0,
        unit="reward",
    )
    seed: int = option(0, effect="Seed of initial weights and of the order of problems", minimum=0, unit="seed")
    alphabet: str = option(
        "",
        effect="Characters that get a token of their own in the made tokenizer; empty means printable ASCII and newline",
        unit="characters",
    )
    phrases: list[str] = option(
        factory=list, effect="Longer strings that get one token each, such as a fixed question text", unit="strings"
    )


@dataclass
class AlgorithmConfig:
    """The GRPO objective and its optimizer."""

    clip_low: float = option(
        0.2, effect="Lower clip of the ratio: 1 - clip_low", minimum=0.0, maximum=1.0, unit="ratio"
    )
    clip_high: float = option(
        0.2, effect="Upper clip of the ratio: 1 + clip_high; DAPO clips higher, at 0.28", minimum=0.0, unit="ratio"
    )
    normalize_advantage: bool = option(True, effect="Divide the group-centred reward by the group's standard deviation")
    drop_uniform_groups: bool = option(
        False,
        effect="Leave groups whose rewards are all equal out of the batch and generate others (DAPO dynamic sampling)",
    )
    overlong_buffer_tokens: int = option(
        0,
        effect="Answers that come within this many tokens of max_new_tokens lose reward, linearly (DAPO soft overlong"
        " punishment); 0 takes nothing off",
        unit="tokens",
        minimum=0,
    )
    overlong_penalty: float = option(
        1.0, effect="Reward that an answer of max_new_tokens tokens loses", unit="reward", minimum=0.0
    )
    behaviour_weight_cap: float = option(
        5.0, effect="Cap of the proximal/behaviour importance weight of decoupled PPO", minimum=1.0, unit="ratio"
    )
    kl_coef: float = option(
        0.0, effect="Weight of the KL estimate to the proximal policy in the loss", minimum=0.0, unit="factor"
    )
    adam_beta1: float = option(0.9, effect="Adam first-moment decay", minimum=0.0, maximum=1.0, unit="factor")
    adam_beta2: float = option(0.95, effect="Adam second-moment decay", minimum=0.0, maximum=1.0, unit="factor")
    adam_eps: float = option(1e-8, effect="Adam epsilon", minimum=0.0, unit="absolute")
    weight_decay: float = option(0.0, effect="Decoupled weight decay on matrices", minimum=0.0, unit="factor")
    clip_grad_norm: float = option(1.0, effect="Global gradient norm limit; 0 disables it", minimum=0.0, unit="norm")
    lr_schedule: str = option(
        "constant", effect="Shape of the learning rate after warm-up", choices=("constant", "cosine", "linear")
    )
    lr_warmup_steps: int = option(0, effect="Steps of linear rise", unit="steps", minimum=0)
    lr_min_ratio: float = option(
        0.0, effect="Final learning rate as a share of the peak", minimum=0.0, maximum=1.0, unit="ratio"
    )
    step_timeout_s: float = option(
        1800.0,
        effect="Time the trainer may take for one step, or for one weight refresh, before the controller gives up",
        unit="s",
        minimum=1.0,
    )


@dataclass
class RolloutConfig:
    """vLLM servers."""

    dtype: str = option(
        "bfloat16",
        effect="Number format of weights and computation in vLLM",
        choices=("float32", "bfloat16", "float16"),
    )
    enforce_eager: bool = option(
        False, effect="Run vLLM without CUDA graphs and compilation: starts faster, generates slower"
    )
    gpu_memory_utilization: float = option(
        0.9, effect="Share of GPU memory that vLLM may take", minimum=0.05, maximum=1.0, unit="fraction"
    )
    kv_cache_bytes: float = option(
        0.0,
        effect="KV cache of one instance on CPU; 0 takes rollout.gpu_memory_utilization of the node's memory",
        unit="bytes",
        minimum=0.0,
    )
    max_num_seqs: int = option(256, effect="Sequences that vLLM decodes together", minimum=1, unit="sequences")
    ready_timeout_s: float = option(600.0, effect="Time a server may take to start", unit="s", minimum=1.0)
    stop_timeout_s: float = option(
        10.0, effect="Time a server may take to stop before it is killed", unit="s", minimum=0.1
    )
    request_timeout_s: float = option(600.0, effect="Time one generation request may take", unit="s", minimum=1.0)
    request_tokens: int = option(
        4096,
        effect="Most tokens asked for in one generation request: small answers share a request, long ones travel alone",
        unit="tokens",
        minimum=1,
    )
    max_retries: int = option(
        3, effect="Failed requests after which a prompt ends the run with an error", minimum=0, unit="requests"
    )
    max_replacements: int = option(
        3,
        effect="Times that each instance is started again after a failure, within an attempt, before the run ends with it",
        unit="restarts",
        minimum=0,
    )
    min_instances: int = option(
        0,
        effect="Least instances with which a run goes on when others cannot be started again; 0 needs all of the plan",
        unit="instances",
        minimum=0,
    )
    heartbeat_interval_s: float = option(1.0, effect="Pause between heartbeats of an instance", unit="s", minimum=0.05)
    heartbeat_timeout_s: float = option(
        60.0, effect="An instance whose heartbeat counter stands still this long counts as dead", unit="s", minimum=1.0
    )
    extra_args: list[str] = option(
        factory=list, effect="Further command-line arguments of the vLLM server", unit="arguments"
    )


@dataclass
class WeightsConfig:
    """The exchange through the run directory."""

    dtype: str = option("bfloat16", effect="Number format of published weights", choices=("float32", "bfloat16"))
    max_file_bytes: float = option(4e9, effect="Largest safetensors file of one version", unit="bytes", minimum=1e4)
    delta: str = option(
        "off",
        effect="sparse publishes changed elements against the version before where that is at most half the bytes, for slow "
        "filesystems; host memory for a second copy of the weights, not with rollout_weight_reload_method=restart",
        choices=("off", "sparse"),
    )
    keep_versions: int = option(2, effect="Newest versions that are never collected", unit="versions", minimum=2)
    keep_records: int = option(
        1000,
        effect="Newest refresh requests and results that are kept; ACKs are kept for the whole run",
        unit="versions",
        minimum=2,
    )
    keep_batches: int = option(64, effect="Newest trained batches that are kept for replay", unit="batches", minimum=4)
    io_threads: int = option(
        0,
        effect="Threads that copy, hash, read and write weights in one process; 0 takes its processors, at most 16",
        unit="threads",
        minimum=0,
    )
    fsync: str = option(
        "auto",
        effect="Flush versions and the records of their exchange; auto does on network and unknown filesystems. All else always is",
        choices=("auto", "always", "never"),
    )
    refresh_timeout_s: float = option(
        600.0,
        effect="Longest time that all instances have to load and prove a version; less once their rate was measured",
        unit="s",
        minimum=1.0,
    )
    refresh_floor_s: float = option(
        120.0,
        effect="Time that all instances have in any case, however fast they were; not more than weights.refresh_timeout_s",
        unit="s",
        minimum=1.0,
    )
    proof_tolerance: float = option(
        0.05,
        effect="Largest difference of a probe log-prob between trainer and engine (1e-3 in float32)",
        unit="nats",
        minimum=0.0,
    )
    probe_tokens: int = option(24, effect="Length of the fixed probe sequence", unit="tokens", minimum=2)


@dataclass
class TraceConfig:
    """Where the spans of `phase_trace_enabled` go."""

    directory: str = option(
        "", effect="Folder of the span files; empty means attempts/N/traces in the run directory", unit="path"
    )
