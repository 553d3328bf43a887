"""From configuration to plan: the division that was asked for, or the one that the planner finds; checked either way."""

from __future__ import annotations

from conf.schema import LibraConfig
from planner.allocation import divided
from planner.architecture import Architecture
from planner.configured import check_configured
from planner.errors import PlanError
from planner.grp import search
from planner.memory import data_parallel, host_bytes, rollout_bytes, trainer_bytes
from planner.placement import check_launchable, choose_layout, place_rollout
from planner.plan import Choice, Plan, Rejected, TrainLayout
from planner.predict import at_best, expected

RUNNERS_UP = 5


def make_plan(config: LibraConfig, arch: Architecture) -> Plan:
    """The plan for `config`. Raises PlanError with wanted, available and the option to change."""
    if config.global_resource_planner.initial_allocation_strategy == "grp":
        found = search(config, arch)
        best, *others = found.choices
        chosen = _chosen(config, best)
        return _plan(chosen, arch, tuple(others[:RUNNERS_UP]), found.rejected, evaluated=found.evaluated)
    fitting, rejections = check_configured(config, arch)
    alternative = alternative_to(config, arch)
    return _plan(config, arch, tuple(fitting), rejections.entries(), alternative=alternative)


def alternative_to(config: LibraConfig, arch: Architecture) -> Choice | None:
    """What grp would choose for the same number of GPUs; None when that is the division in `config`."""
    try:
        best = search(config, arch).choices[0]
    except PlanError:
        # The search is stricter than what was asked for: it takes only the usual tensor-parallel sizes.
        return None
    return None if _chosen(config, best) is config else best


def _chosen(config: LibraConfig, choice: Choice) -> LibraConfig:
    return divided(
        config,
        train_gpus=choice.train_gpus,
        rollout_gpus=choice.rollout_gpus,
        train_tp_size=choice.train_tp_size,
    )


def _plan(
    config: LibraConfig,
    arch: Architecture,
    runners_up: tuple[Choice, ...],
    rejected: tuple[Rejected, ...],
    *,
    alternative: Choice | None = None,
    evaluated: int = 1,
) -> Plan:
    layout, reason = choose_layout(config)
    separate = layout == "hetjob"
    host = host_bytes(config, arch)
    return Plan(
        layout=layout,
        layout_reason=reason,
        device=config.hardware.device,
        train=_train_layout(config, nodes=check_launchable(config, separate=separate)),
        rollout=place_rollout(config, separate=separate, first_gpu=0 if separate else config.train_gpus),
        memory_bytes={"trainer": trainer_bytes(config, arch), "rollout": rollout_bytes(config, arch)}
        | ({"trainer_host": host} if host else {}),
        predicted=expected(config, arch),
        rejected=rejected,
        runners_up=runners_up,
        strategy=config.global_resource_planner.initial_allocation_strategy,
        bounds=at_best(config, arch),
        alternative=alternative,
        evaluated=evaluated,
    )


def _train_layout(config: LibraConfig, *, nodes: int) -> TrainLayout:
    return TrainLayout(
        gpus=config.train_gpus,
        nodes=nodes,
        gpus_per_node=config.train_gpus // nodes,
        tp=config.train_tp_size,
        pp=config.train_pp_size,
        cp=config.train_cp_size,
        dp=data_parallel(config),
        micro_batch_size=config.micro_batch_size,
    )
