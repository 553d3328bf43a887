"""A plan as a person reads it."""

from __future__ import annotations

import re

from planner.plan import Choice, Plan

LONGEST_BRANCH = 60


def describe(plan: Plan) -> str:
    """One line for each thing that was decided, expected or ruled out."""
    train, rollout = plan.train, plan.rollout
    lines = [
        f"layout     {plan.layout} ({plan.layout_reason})",
        f"division   {_division(plan)}",
        f"trainer    {train.gpus} x {plan.device} on {train.nodes} node(s):"
        f" TP {train.tp} x PP {train.pp} x CP {train.cp} x DP {train.dp}, micro-batch {train.micro_batch_size}",
        f"rollout    {rollout.gpus} x {plan.device} on {rollout.nodes} node(s): {len(rollout.instances)} instance(s) of TP {rollout.instances[0].tp}",
        *_memory(plan),
        *_times(plan),
    ]
    if plan.alternative is not None:
        lines.append(
            f"grp        would choose {_choice(plan.alternative)}; this plan takes {plan.predicted['step_s']:.3g} s"
            " (global_resource_planner.initial_allocation_strategy=grp)"
        )
    label = "next best " if plan.strategy == "grp" else "also fits "
    lines.extend(f"{label} {_choice(choice)}" for choice in plan.runners_up)
    lines.extend(f"rejected   {_shortened(cut.branch)}: {_without_terms(cut.reason)}" for cut in plan.rejected)
    return "\n".join(lines)


def _division(plan: Plan) -> str:
    if plan.strategy == "grp":
        total = plan.train.gpus + plan.rollout.gpus
        return f"grp: the best of {plan.evaluated} ways to divide {total} GPUs that fit"
    return "configured: train_gpus, rollout_gpus and train_tp_size as given"


def _memory(plan: Plan) -> list[str]:
    lines = []
    for side, terms in plan.memory_bytes.items():
        parts = ", ".join(
            f"{name} {value / 1e9:.3g}" for name, value in terms.items() if name not in ("total", "budget")
        )
        name, unit = ("trainer", "GB of host memory per node") if side == "trainer_host" else (side, "GB per GPU")
        budget = f" of {terms['budget'] / 1e9:.3g}" if "budget" in terms else ""
        lines.append(f"memory     {name}: {terms['total'] / 1e9:.3g}{budget} {unit} ({parts})")
    return lines


def _times(plan: Plan) -> list[str]:
    best, times = plan.bounds, plan.predicted
    return [
        f"at best    train {best['train_s']:.3g} s, generate {best['generate_s']:.3g} s, refresh {best['refresh_s']:.3g} s a step"
        f" (hardware bounds; weights {best['weight_bytes'] / 1e9:.3g} GB)",
        f"expected   train {times['train_s']:.3g} s, generate {times['generate_s']:.3g} s: {times['step_s']:.3g} s a step"
        f" ({_terms(times)}; every trajectory counted with max_model_len tokens, efficiencies as in docs/planner.md)",
    ]


def _terms(times: dict[str, float]) -> str:
    """The terms that make a twentieth of the step or more, largest first."""
    least = times["step_s"] / 20
    terms = {name: s for name, s in times.items() if name not in ("step_s", "train_s", "generate_s") and s >= least}
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    return ", ".join(f"{name.removesuffix('_s')} {seconds:.3g}" for name, seconds in ordered)


def _choice(choice: Choice) -> str:
    return (
        f"train_gpus={choice.train_gpus} rollout_gpus={choice.rollout_gpus} train_tp_size={choice.train_tp_size}:"
        f" train {choice.train_s:.3g} s, generate {choice.generate_s:.3g} s"
    )


def _shortened(branch: str) -> str:
    return branch if len(branch) <= LONGEST_BRANCH else f"{branch[:LONGEST_BRANCH].rpartition(',')[0]}, ..."


def _without_terms(reason: str) -> str:
    """The terms of a sum, in brackets, stay in plan.json."""
    return re.sub(r" \([^()]*\d[^()]*\)", "", reason)
