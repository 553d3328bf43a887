"""GPUs per node, how steps ask for them, and which ones a step then sees."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import Any

from launch.doctor.commands import ask
from launch.doctor.evidence import Evidence, Report
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.inside.meeting import Scene
from launch.doctor.wording import by_value, size

KEY = "gpus"
QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits")
SIDE_BY_SIDE = ("side_a", "side_b", "side_cpu")
"""Three steps at the same time on one node: two with a GPU each, one without (as two engines and the controller)."""
OTHER_WAYS = {"other_gres": "--gres=gpu:{}", "other_gpus": "--gpus={}"}
"""Tried only when --gpus-per-node does not work."""


def measure(_scene: Scene) -> dict[str, Any]:
    """`visible`: CUDA_VISIBLE_DEVICES, None when unset. `cards`: what nvidia-smi lists. `devices`: device files."""
    return visibility()


def visibility() -> dict[str, Any]:
    answer = ask(QUERY)
    return {
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cards": parse_cards(answer.out) if answer.is_ok else [],
        "no_cards": "" if answer.is_ok else answer.words,
        "devices": len(glob.glob("/dev/nvidia[0-9]*")),
    }


def parse_cards(text: str) -> list[dict[str, Any]]:
    """Lines "0, GPU-6f..., NVIDIA H200, 143771, 580.159.04" of nvidia-smi; its memory unit is MiB."""
    cards = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5 and parts[0].isdigit():
            index, uuid, name, memory, driver = parts
            cards.append(
                {
                    "index": int(index),
                    "uuid": uuid,
                    "name": name,
                    "memory_bytes": int(memory) * 2**20 if memory.isdigit() else 0,
                    "driver": driver,
                }
            )
    return cards


def visible_list(facts: Report) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES; nvidia-smi's indices when it is unset."""
    if facts["visible"] is None:
        return [str(card["index"]) for card in facts["cards"]]
    return [entry.strip() for entry in str(facts["visible"]).split(",") if entry.strip()]


def usable(facts: Report) -> int:
    """Cards that a program started so could use; nvidia-smi lists all of the machine, whatever the variable says."""
    return len(visible_list(facts)) if facts["cards"] else 0


def physical(facts: Report) -> list[str]:
    """The visible GPUs by UUID where nvidia-smi knows it, else by number."""
    by_index = {str(card["index"]): str(card["uuid"]) for card in facts["cards"]}
    return [by_index.get(entry, entry) for entry in visible_list(facts)]


def judge(evidence: Evidence) -> list[Finding]:
    return [_cards(evidence), *([_flag(evidence), *_steps(evidence)] if evidence.mode == "slurm" else [])]


def cards(evidence: Evidence) -> list[Report]:
    """All cards that nvidia-smi lists, over all nodes."""
    return [card for facts in evidence.answers(KEY).values() for card in facts["cards"]]


def _cards(evidence: Evidence) -> Finding:
    name = "GPUs"
    answers = evidence.answers(KEY)
    if not answers:
        return not_tried(name, evidence.why_not(KEY), "plan with hardware.* as configured")
    if not cards(evidence):
        return _no_cards(evidence, answers)
    texts = {node: _card_text(facts["cards"]) for node, facts in answers.items()}
    libra = "plan with the least memory among them (hardware.gpu_memory_bytes)"
    kinds = {(card["name"], card["driver"], card["memory_bytes"]) for card in cards(evidence)}
    if len(kinds) > 1:
        return note(name, f"not alike: {by_value(texts)}", libra)
    return ok(name, by_value(texts), libra)


def _no_cards(evidence: Evidence, answers: Mapping[str, Report]) -> Finding:
    asked = evidence.asking.count
    facts = next(iter(answers.values()))
    reason = f"{facts['no_cards'] or 'nvidia-smi lists none'}; {facts['devices']} files /dev/nvidia*"
    if not asked:
        return note("GPUs", f"none ({reason})", "run on processors (hardware=cpu), which is for trying things out")
    return note(
        "GPUs",
        f"Slurm gives {asked} to each node here, and no node shows one ({reason})",
        "believe Slurm's count; memory and speed of a GPU stay as configured (hardware=...)",
    )


def _card_text(found: list[Report]) -> str:
    kinds: dict[str, int] = {}
    for card in found:
        text = f"{card['name']} with {size(card['memory_bytes'])}, driver {card['driver']}"
        kinds[text] = kinds.get(text, 0) + 1
    return ", ".join(f"{count} x {text}" for text, count in kinds.items()) or "none"


def _flag(evidence: Evidence) -> Finding:
    """What sbatch takes. Steps ask with --gpus-per-node, or not at all (slurm.gpu_flag=none)."""
    name = "how a job asks for GPUs"
    asking = evidence.asking
    refused = "; ".join(f"slurm.gpu_flag={flag} was refused: {words}" for flag, words in asking.refused.items())
    if not evidence.job.job_id:
        return not_tried(name, refused or evidence.no_step, f"ask with slurm.gpu_flag={asking.configured}")
    if asking.flag == asking.configured:
        return ok(name, f"sbatch took slurm.gpu_flag={asking.flag}, {asking.count} on each node", "ask the same way")
    return note(
        name,
        f"{refused}; sbatch took slurm.gpu_flag={asking.flag}",
        f"ask so once slurm.gpu_flag={asking.flag} is set (the profile does)",
    )


# ---- steps -------------------------------------------------------------------------------------------------------------


def _steps(evidence: Evidence) -> list[Finding]:
    asked = evidence.asking.count
    if asked:
        return [_whole_node(evidence, asked), _none(evidence), _side_by_side(evidence)]
    return [not_tried("GPUs of a step", "no GPUs were asked for", "ask for none"), _side_by_side(evidence)]


def _whole_node(evidence: Evidence, asked: int) -> Finding:
    name = f"--gpus-per-node={asked}"
    answers = evidence.answers(KEY)
    if not answers:
        ways = _other_ways(evidence)
        if ways:
            return problem(
                name, f"the step did not start; {ways} did", "not start GPU steps here: it writes --gpus-per-node"
            )
        return not_tried(name, evidence.why_not(KEY), "write --gpus-per-node in every step")
    seen = by_value({node: f"CUDA_VISIBLE_DEVICES={_shown(facts)}" for node, facts in answers.items()})
    if any(len(visible_list(facts)) != asked for facts in answers.values()):
        return problem(
            name,
            f"{seen}: {asked} were asked for",
            "not see its GPUs: gres.conf must name device files (File=...); ask the administrators",
        )
    return ok(name, seen, "write --gpus-per-node in every step, and count GPUs by the length of the list")


def _other_ways(evidence: Evidence) -> str:
    return " and ".join(OTHER_WAYS[name].format(1) for name in OTHER_WAYS if _report(evidence, name))


def _none(evidence: Evidence) -> Finding:
    name = "--gpus-per-node=0"
    report = _report(evidence, "side_cpu")
    if not report:
        return not_tried(name, _why_no_step(evidence, "side_cpu"), "write it for steps without GPUs")
    if visible_list({**report, "cards": []}):
        return note(name, f"the step still sees {_shown(report)}", "hide GPUs from the controller itself")
    return ok(name, "the step sees no GPU", "write it for steps without GPUs, such as the controller")


def _side_by_side(evidence: Evidence) -> Finding:
    """Two instances on one node are two steps at the same time; they must start, and must not share a GPU."""
    name = "steps side by side"
    asked = evidence.asking.count
    reports = {step: report for step in SIDE_BY_SIDE if (report := _report(evidence, step))}
    wanted = [step for step in SIDE_BY_SIDE if step in evidence.steps]
    if not wanted:
        return not_tried(name, evidence.no_step, "start them with --exact")
    missing = [step for step in wanted if step not in reports]
    if missing:
        why = _why_no_step(evidence, missing[0])
        return problem(
            name,
            f"of {len(wanted)} steps with --exact {len(missing)} did not start: {why}",
            "not run two stages on a node",
        )
    if not all(report["together"] for report in reports.values()):
        return problem(
            name, "steps with --exact ran one after another", "not run two stages on a node: they wait for each other"
        )
    with_gpu = [reports[step] for step in ("side_a", "side_b") if step in reports]
    if not asked or len(with_gpu) < 2:
        return ok(
            name, f"{len(wanted)} steps with --exact ran at the same time", "start every stage as a step of its own"
        )
    return _different(name, with_gpu)


def _different(name: str, pair: list[Report]) -> Finding:
    shown = " and ".join(f"CUDA_VISIBLE_DEVICES={_shown(report)}" for report in pair)
    first, second = (physical(report) for report in pair)
    if not set(first) & set(second) and first and second:
        numbering = (
            "numbered over the node"
            if visible_list(pair[0]) != visible_list(pair[1])
            else "numbered from 0 in each step"
        )
        return ok(
            name, f"different GPUs ({shown}, {numbering})", "never count with these numbers, only with their length"
        )
    if first and second and not any(report["cards"] for report in pair):
        return not_tried(
            name,
            f"{shown}: the same number, and without nvidia-smi nobody can say whether it is the same GPU",
            "trust --exact",
        )
    return problem(
        name, f"not different GPUs: {shown}", "put two engines on one GPU; ask the administrators (gres.conf, --exact)"
    )


def _report(evidence: Evidence, step: str) -> Report:
    found: Report = evidence.steps.get(step, {}).get("report") or {}
    return found


def _why_no_step(evidence: Evidence, step: str) -> str:
    return str(evidence.steps.get(step, {}).get("said") or evidence.no_step)


def _shown(facts: Report) -> str:
    return "(unset)" if facts["visible"] is None else str(facts["visible"]) or "(empty)"
