"""What a layout must obey beside the schema's ranges: rules that need the architecture, the machine or the planner's options.

Each raises PlanError with wanted, available and the option to change. The same rules judge what was asked for and every
candidate of the search.
"""

from __future__ import annotations

from conf.schema import LibraConfig
from planner.architecture import Architecture
from planner.errors import PlanError
from planner.memory import data_parallel, host_bytes, rollout_bytes, trainer_bytes
from planner.train_cost import communication_compute_ratio

USUAL_TENSOR_PARALLEL = (1, 2, 4, 8)
PLANNER = "global_resource_planner"


def tensor_parallel_candidates(config: LibraConfig) -> tuple[int, ...]:
    """allowed_train_tp, or the usual sizes when it is empty; ascending."""
    return tuple(sorted(set(config.global_resource_planner.allowed_train_tp or USUAL_TENSOR_PARALLEL)))


def check_instance(config: LibraConfig, arch: Architecture) -> None:
    """An instance holds the model, split evenly over its GPUs: whatever the division between the sides."""
    tp, heads = config.vllm_tp_size, arch.key_value_heads
    if heads % tp and tp % heads:
        raise PlanError(
            f"vllm_tp_size={tp} neither divides nor is a multiple of the model's {heads} key/value heads; change it"
        )
    for name, count in (("attention heads", arch.heads), mlp_width(arch)):
        if count % tp:
            raise PlanError(
                f"vllm_tp_size={tp} does not divide the model's {count} {name}; choose a divisor of {count}"
            )


def mlp_width(arch: Architecture) -> tuple[str, int]:
    """The width that tensor parallelism splits, and its name in config.json."""
    if arch.is_moe:
        return "moe_intermediate_size", arch.moe_intermediate_size
    return "intermediate_size", arch.intermediate


def check_train_tp(config: LibraConfig, arch: Architecture) -> None:
    """train_tp_size splits the model evenly, inside a node."""
    tp, per_node = config.train_tp_size, config.hardware.gpus_per_node
    if tp > per_node:
        raise PlanError(
            f"train_tp_size={tp} is more than hardware.gpus_per_node={per_node}; tensor parallelism stays inside a node"
        )
    for name, count in (
        ("attention heads", arch.heads),
        ("key/value heads", arch.key_value_heads),
        mlp_width(arch),
    ):
        if count % tp:
            raise PlanError(
                f"train_tp_size={tp} does not divide the model's {count} {name}; choose a divisor of {count}"
            )
    rows = -(-arch.vocab // tp)
    if rows * (tp - 1) >= arch.vocab:
        raise PlanError(f"train_tp_size={tp} leaves a rank without any of the {arch.vocab} tokens; lower train_tp_size")


def check_train_tp_allowed(config: LibraConfig, arch: Architecture) -> None:
    """train_tp_size is one that the planner's options let through."""
    planner, tp = config.global_resource_planner, config.train_tp_size
    if planner.allowed_train_tp and tp not in planner.allowed_train_tp:
        raise PlanError(
            f"train_tp_size={tp} is not in {PLANNER}.allowed_train_tp={list(planner.allowed_train_tp)}; change one of them"
        )
    threshold = planner.train_comm_compute_ratio_threshold
    if threshold is None:
        return
    ratio = communication_compute_ratio(config, arch)
    if ratio > threshold:
        raise PlanError(
            f"train_tp_size={tp} has a communication/compute ratio of {ratio:.4g}, above"
            f" {PLANNER}.train_comm_compute_ratio_threshold={threshold:g}; lower train_tp_size or raise the threshold"
        )


def check_split(config: LibraConfig) -> None:
    """Floors and granularity of the division."""
    planner = config.global_resource_planner
    for side, gpus, floor in (
        ("train", config.train_gpus, planner.min_train_gpus),
        ("rollout", config.rollout_gpus, planner.min_rollout_gpus),
    ):
        if gpus < floor:
            raise PlanError(f"{side}_gpus={gpus} is below {PLANNER}.min_{side}_gpus={floor}; change one of them")
    step = planner.allocation_granularity_gpus
    if config.train_gpus % step:
        below, above = config.train_gpus // step * step, -(-config.train_gpus // step) * step
        sizes = f"{below} or {above}" if below else str(above)
        raise PlanError(
            f"train_gpus={config.train_gpus} is not a multiple of {PLANNER}.allocation_granularity_gpus={step};"
            f" set train_gpus to {sizes}"
        )


def check_ranks(config: LibraConfig) -> None:
    """The trainer's ranks are whole replicas, and each gets a trajectory of every batch."""
    ranks = config.train_tp_size * config.train_pp_size * config.train_cp_size
    if config.train_gpus % ranks:
        raise PlanError(
            f"train_gpus={config.train_gpus} is not a multiple of train_tp_size x train_pp_size x train_cp_size = {ranks};"
            " change one of them"
        )
    if config.batch_size < data_parallel(config):
        raise PlanError(
            f"batch_size={config.batch_size} is smaller than the data-parallel degree {data_parallel(config)}; lower"
            " train_gpus, or raise train_tp_size or batch_size"
        )


def check_trainer_memory(config: LibraConfig, arch: Architecture, hint: str = "") -> None:
    """`hint` is added to the message; it may name a size that would fit."""
    terms = trainer_bytes(config, arch)
    if terms["total"] > terms["budget"]:
        options = "train_tp_size, micro_batch_size or train_gpus"
        raise PlanError(_too_big("training", "GPU", terms, options) + hint)
    host = host_bytes(config, arch)
    if host and host["total"] > host.get("budget", host["total"]):
        options = "slurm.mem_per_node_bytes, megatron_optimizer_offload_fraction or train_gpus"
        raise PlanError(_too_big("offloading the optimizer", "trainer node", host, options))


def check_rollout_memory(config: LibraConfig, arch: Architecture) -> None:
    """An instance holds its share of the weights and a single longest sequence: less than that, and vLLM does not start."""
    terms = rollout_bytes(config, arch)
    if terms["total"] > terms["budget"]:
        options = "vllm_tp_size, rollout.gpu_memory_utilization, max_model_len or rollout.max_num_seqs"
        raise PlanError(_too_big("generating", "GPU", terms, options))


def _too_big(what: str, where: str, terms: dict[str, float], options: str) -> str:
    parts = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in terms.items() if name not in ("total", "budget"))
    return (
        f"{what} wants {terms['total'] / 1e9:.2f} GB on each {where} ({parts}), available {terms['budget'] / 1e9:.2f} GB;"
        f" change {options}"
    )
