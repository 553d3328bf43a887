"""From configuration to plan: the layout that was asked for, checked, and the neighbours that would do as well."""

from __future__ import annotations

from dataclasses import replace

from conf.schema import LibraConfig
from planner.architecture import Architecture
from planner.bounds import lower_bounds
from planner.errors import PlanError
from planner.memory import rollout_bytes, trainer_bytes
from planner.placement import aligned_nodes, place_rollout
from planner.plan import Plan, Rejected, TrainLayout

TENSOR_PARALLEL_CANDIDATES = (1, 2, 4, 8)


def make_plan(config: LibraConfig, arch: Architecture) -> Plan:
    """The plan for `config`. Raises PlanError with wanted, available and the option to change."""
    layout, reason = choose_layout(config)
    train = train_layout(config, separate=layout == "hetjob")
    first_gpu = 0 if layout == "hetjob" else config.train_gpus
    rollout = place_rollout(config, separate=layout == "hetjob", first_gpu=first_gpu)
    check_train_parallel(config, arch, train)
    check_floors(config)
    fitting, rejected = survey(config, arch, train)
    train_terms = trainer_bytes(config, arch, tp=train.tp, dp=train.dp, micro_batch=train.micro_batch_size)
    if train_terms["total"] > train_terms["budget"]:
        raise PlanError(_too_big("training", train_terms, fitting, "train_tp_size, micro_batch_size or train_gpus"))
    rollout_terms = rollout_bytes(config, arch, tp=config.vllm_tp_size)
    if rollout_terms["total"] > rollout_terms["budget"]:
        raise PlanError(
            _too_big("generation", rollout_terms, [], "vllm_tp_size, max_model_len or rollout.gpu_memory_utilization")
        )
    return Plan(
        layout=layout,
        layout_reason=reason,
        device=config.hardware.device,
        train=train,
        rollout=rollout,
        memory_bytes={"trainer": train_terms, "rollout": rollout_terms},
        predicted=lower_bounds(config, arch, train, rollout),
        rejected=tuple(rejected),
        runners_up=tuple({"train_tp_size": tp} for tp in fitting if tp != train.tp),
    )


def choose_layout(config: LibraConfig) -> tuple[str, str]:
    """("hetjob" | "single", why). A local run shares this one machine, so it is planned as a single job."""
    if config.launch.mode == "local":
        return "single", "launch.mode=local: both sides share this machine"
    if config.slurm.layout == "single":
        return "single", "slurm.layout=single: one job with exact steps; it survives the loss of a rollout node"
    return (
        "hetjob",
        "slurm.layout=hetjob: trainer and rollout need different shapes, and rollout components can be handed back",
    )


def train_layout(config: LibraConfig, *, separate: bool) -> TrainLayout:
    per_node = config.hardware.gpus_per_node
    if not separate:
        check_shared_nodes(config)
    nodes = aligned_nodes(config.train_gpus, per_node, "train_gpus")
    ranks = config.train_tp_size * config.train_pp_size * config.train_cp_size
    if config.train_gpus % ranks:
        raise PlanError(
            f"train_gpus={config.train_gpus} is not a multiple of train_tp_size x train_pp_size x train_cp_size = {ranks}; change one of them"
        )
    return TrainLayout(
        gpus=config.train_gpus,
        nodes=nodes,
        gpus_per_node=config.train_gpus // nodes,
        tp=config.train_tp_size,
        pp=config.train_pp_size,
        cp=config.train_cp_size,
        dp=config.train_gpus // ranks,
        micro_batch_size=config.micro_batch_size,
    )


def check_shared_nodes(config: LibraConfig) -> None:
    """A local run has one node; a single job on several nodes keeps trainer and rollout on whole nodes."""
    per_node, total = config.hardware.gpus_per_node, config.train_gpus + config.rollout_gpus
    if total <= per_node:
        return
    if config.launch.mode == "local":
        raise PlanError(
            f"train_gpus={config.train_gpus} + rollout_gpus={config.rollout_gpus} = {total} do not fit on this machine:"
            f" hardware.gpus_per_node={per_node}; lower one of them or use a Slurm cluster (cluster=slurm)"
        )
    if total % per_node:
        raise PlanError(
            f"slurm.layout=single needs train_gpus + rollout_gpus = {total} to fill whole nodes of hardware.gpus_per_node={per_node}"
        )


def check_train_parallel(config: LibraConfig, arch: Architecture, train: TrainLayout) -> None:
    if train.tp > config.hardware.gpus_per_node:
        raise PlanError(
            f"train_tp_size={train.tp} is more than hardware.gpus_per_node={config.hardware.gpus_per_node}; tensor parallelism stays inside a node"
        )
    for name, count in (("attention heads", arch.heads), ("key/value heads", arch.key_value_heads)):
        if count % train.tp:
            raise PlanError(
                f"train_tp_size={train.tp} does not divide the model's {count} {name}; choose a divisor of {count}"
            )
    if arch.heads % config.vllm_tp_size:
        raise PlanError(
            f"vllm_tp_size={config.vllm_tp_size} does not divide the model's {arch.heads} attention heads; choose a divisor"
        )


def check_floors(config: LibraConfig) -> None:
    planner = config.global_resource_planner
    for side, wanted, floor in (
        ("train", config.train_gpus, planner.min_train_gpus),
        ("rollout", config.rollout_gpus, planner.min_rollout_gpus),
    ):
        if wanted < floor:
            raise PlanError(f"{side}_gpus={wanted} is below global_resource_planner.min_{side}_gpus={floor}")


def survey(config: LibraConfig, arch: Architecture, train: TrainLayout) -> tuple[list[int], list[Rejected]]:
    """Every tensor-parallel degree for these GPUs: the ones that fit, and the rest with the reason."""
    fitting: list[int] = []
    rejected: list[Rejected] = []
    for tp in TENSOR_PARALLEL_CANDIDATES:
        branch = f"train_tp_size={tp}"
        if train.gpus % tp or tp > config.hardware.gpus_per_node:
            rejected.append(
                Rejected(branch, f"does not divide {train.gpus} GPUs on nodes of {config.hardware.gpus_per_node}")
            )
            continue
        candidate = replace(train, tp=tp, dp=train.gpus // tp)
        try:
            check_train_parallel(config, arch, candidate)
        except PlanError as error:
            rejected.append(Rejected(branch, str(error)))
            continue
        terms = trainer_bytes(config, arch, tp=tp, dp=candidate.dp, micro_batch=candidate.micro_batch_size)
        if terms["total"] > terms["budget"]:
            rejected.append(
                Rejected(
                    branch, f"needs {terms['total'] / 1e9:.1f} GB per GPU, available {terms['budget'] / 1e9:.1f} GB"
                )
            )
        else:
            fitting.append(tp)
    return fitting, rejected


def _too_big(what: str, terms: dict[str, float], fitting: list[int], options: str) -> str:
    parts = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in terms.items() if name not in ("total", "budget"))
    hint = f"; train_tp_size={fitting[0]} would fit" if fitting else ""
    return (
        f"{what} wants {terms['total'] / 1e9:.2f} GB on each GPU ({parts}), available {terms['budget'] / 1e9:.2f} GB;"
        f" change {options}{hint}"
    )


def describe(plan: Plan) -> str:
    """The plan as a person reads it."""
    rollout = plan.rollout
    lines = [
        f"layout     {plan.layout} ({plan.layout_reason})",
        f"trainer    {plan.train.gpus} x {plan.device} on {plan.train.nodes} node(s):"
        f" TP {plan.train.tp} x PP {plan.train.pp} x CP {plan.train.cp} x DP {plan.train.dp}, micro-batch {plan.train.micro_batch_size}",
        f"rollout    {rollout.gpus} x {plan.device} on {rollout.nodes} node(s): {len(rollout.instances)} instance(s) of TP {rollout.instances[0].tp}",
    ]
    for side, terms in plan.memory_bytes.items():
        parts = ", ".join(
            f"{name} {value / 1e9:.3g}" for name, value in terms.items() if name not in ("total", "budget")
        )
        lines.append(
            f"memory     {side}: {terms['total'] / 1e9:.3g} of {terms['budget'] / 1e9:.3g} GB per GPU ({parts})"
        )
    bounds = plan.predicted
    lines.append(
        f"at best    train {bounds['train_s']:.3g} s, generate {bounds['generate_s']:.3g} s, refresh {bounds['refresh_s']:.3g} s a step"
        f" (hardware bounds if every trajectory has max_model_len tokens; weights {bounds['weight_bytes'] / 1e9:.3g} GB)"
    )
    lines.extend(
        f"also fits  {', '.join(f'{key}={value}' for key, value in other.items())}" for other in plan.runners_up
    )
    lines.extend(f"rejected   {cut.branch}: {cut.reason}" for cut in plan.rejected)
    return "\n".join(lines)
