"""From a command line to the evidence: ask Slurm, run the job (or this machine's part of it), collect what was reported."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conf.schema import LibraConfig
from launch import machine
from launch.containers import surroundings
from launch.doctor import job, slurm_facts
from launch.doctor.evidence import Evidence, GpuAsking, HetjobStory, JobStory
from launch.doctor.inside.driver import drive_here
from launch.doctor.order import FULL, QUICK, Order
from launch.doctor.probes import collective, engine, interpreter, packages
from launch.doctor.probes.collective import RATES
from launch.doctor.slurm_facts import SlurmFacts
from launch.doctor.workplace import workplace
from stages.files import list_names, make_directory, read_json

QUICK_CORES = 4
QUICK_GPUS = 2
QUICK_BYTES = 2**30
PROGRAMS = (collective.PROGRAM, engine.PROGRAM)
NO_NODES = "nodes are not known; see the findings about Slurm"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What the user asked for. `nodes` 0 takes two where there are two."""

    config: LibraConfig
    quick: bool = False
    nodes: int = 0
    run_root: Path = field(default_factory=lambda: Path("runs"))
    queue_wait_s: float = 300.0


def examine(wish: Wish, say: Say) -> Evidence:
    """Raises NoWorkplaceError, JobSpecError; KeyboardInterrupt passes through after everything was taken away."""
    absent, silent = why_local(wish.config.launch.mode, shutil.which("sbatch") is not None, machine.has_slurm)
    here = {packages.KEY: packages.measure(), interpreter.KEY: interpreter.place()}
    facts = None if absent else slurm_facts.gather(wish.config.slurm.partition)
    with workplace(wish.run_root) as folder:
        order = make_order(wish, folder, facts)
        make_directory(order.reports)
        order.write()
        evidence = Evidence(
            mode=order.mode,
            quick=wish.quick,
            configured={name: getattr(wish.config.hardware, name.partition(".")[2]) for name in RATES.values()},
            here=here,
            slurm=facts,
            absent=absent,
            silent=silent,
        )
        if facts is None:
            say(f"no Slurm ({absent}): examining this machine alone")
            drive_here(order)
            return _collect(evidence, order, JobStory(), HetjobStory())
        return _with_slurm(evidence, order, wish, facts, say)


def why_local(mode: str, has_sbatch: bool, answers: Callable[[], bool]) -> tuple[str, bool]:
    """Why there is no Slurm to ask ("" when there is one), and whether that is wrong: programs without a controller, say."""
    if mode == "local":
        return "launch.mode=local", False
    if has_sbatch:
        return ("", False) if answers() else ("sbatch is here, and no controller answers (scontrol ping)", True)
    return "sbatch is not on PATH", mode in ("slurm", "allocation")


def make_order(wish: Wish, folder: Path, facts: SlurmFacts | None) -> Order:
    """Sizes that every usable node has: all of it in the full mode, little in the quick one, which starts sooner."""
    nodes, options = facts.usable if facts else (), wish.config.slurm
    threads = max((node.threads for node in nodes), default=1)
    around = surroundings(wish.config)
    order = Order(
        token=folder.name.rpartition("-")[2],
        folder=str(folder),
        mode="slurm" if facts else "local",
        quick=wish.quick,
        python=wish.config.launch.python or sys.executable,
        nodes=1 if facts is None else wish.nodes or min(2, len(nodes)) or 1,
        cpus=min((node.cpus for node in nodes), default=len(os.sched_getaffinity(0))) or 1,
        gpus=0 if options.gpu_flag == "none" else min((node.gpus(options.gpu_type) for node in nodes), default=0),
        mem_bytes=int(options.mem_per_node_bytes),
        limits=QUICK if wish.quick else FULL,
        threads=threads,
        gpu_flag=options.gpu_flag,
        gpu_type=options.gpu_type,
        prefixes={role: list(words) for role, words in around.prefixes.items()},
        srun_extra={role: list(words) for role, words in around.srun_extra.items()},
    )
    if not wish.quick:
        return order
    cpus, gpus = min(order.cpus, QUICK_CORES * threads), min(order.gpus, QUICK_GPUS)
    return replace(order, cpus=cpus, gpus=gpus, mem_bytes=QUICK_BYTES)


def _with_slurm(evidence: Evidence, order: Order, wish: Wish, facts: SlurmFacts, say: Say) -> Evidence:
    if not facts.usable:
        return replace(evidence, job=JobStory(trouble=NO_NODES), hetjob=HetjobStory(None, NO_NODES))
    order, submitted, refused = _submit(order, wish.config, facts, say)
    if isinstance(submitted, str):
        story = job.refused(submitted)
    else:
        say(f"job {submitted.job_id}: {order.nodes} nodes, {order.cpus} processors and {order.gpus} GPUs on each")
        story = job.follow(submitted, order, wish.queue_wait_s)
    hetjob = job.try_hetjob(order, wish.config, len(facts.usable), wish.queue_wait_s, say)
    asking = GpuAsking(order.gpus, order.gpu_flag, wish.config.slurm.gpu_flag, refused)
    return _collect(replace(evidence, asking=asking), order, story, hetjob)


def _submit(
    order: Order, config: LibraConfig, facts: SlurmFacts, say: Say
) -> tuple[Order, job.Submitted | str, dict[str, str]]:
    """With the first way to ask for GPUs that sbatch takes: (order with it, job or the first refusal, refusals by way).

    "none" is another way only where Slurm has no GPUs: elsewhere it is accepted for want of any demand.
    """
    most_min = facts.partition.max_minutes if facts.partition else None
    others = ("gpus-per-node", "gres") if order.gpus else ("none",)
    refused: dict[str, str] = {}
    for flag in dict.fromkeys((order.gpu_flag, *others)):
        tried = replace(order, gpu_flag=flag)
        tried.write()
        submitted = job.submit(order.path / "job.sbatch", job.script(tried, config, most_min), say)
        if not isinstance(submitted, str):
            return tried, submitted, refused
        refused[flag] = submitted
    return order, refused[order.gpu_flag], refused


def _collect(evidence: Evidence, order: Order, story: JobStory, hetjob: HetjobStory) -> Evidence:
    """Read every report before the folder goes."""
    names = list_names(order.reports)
    reports = {name.removesuffix(".json"): read_json(order.reports / name) or {} for name in names}
    nodes = [report for name, report in reports.items() if name.startswith("node.")]
    own = {**evidence.here[interpreter.KEY], "digest_after": interpreter.place()["digest"]}
    return replace(
        evidence,
        here={**evidence.here, interpreter.KEY: own},
        job=story,
        hetjob=hetjob,
        nodes={str(report["node"]): report for report in sorted(nodes, key=lambda report: int(report["rank"]))},
        steps=_steps(reports),
        programs={name: reports[name] for name in PROGRAMS if name in reports},
    )


def _steps(reports: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the driver noted about each program, with the program's own report where it wrote one."""
    steps: dict[str, dict[str, Any]] = dict(reports.get("driver", {}).get("steps", {}))
    return {name: {**step, "report": reports.get(f"step.{name}")} for name, step in steps.items()}
