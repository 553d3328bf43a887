"""HetJobSpec -> sbatch text. Pure: the same text for a dry run and for a real job.

Slurm's rules behind the layout of the script: options of one component end at `#SBATCH hetjob`; which options carry over to
the next component changes between releases, so every resource option is written for every component; --output belongs to
component 0 only; the batch script runs on the first node of component 0 only. The supervisor replaces the batch shell
(`exec`), otherwise `B:USR1` and scancel would end the shell and leave the Python child behind.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conf.schema import LibraConfig
from launch.desired_steps import desired_steps
from launch.errors import LibraError
from planner.plan import Plan
from stages.desired import StepSpec

__all__ = ["Component", "HetJobSpec", "JobSpecError", "desired_steps", "job_spec", "render", "render_job"]

SIGNAL_BEFORE_LIMIT_S = 120
"""Slurm may send the signal up to 60 s early and, as seen on 22.05, 19 s late."""


class JobSpecError(LibraError, ValueError):
    """The plan or an option cannot be written as a job: the message has wanted, available and the option to change."""

    exit_code = 2


@dataclass(frozen=True)
class Component:
    """One hetjob component (the whole job when the layout is single). Sizes are per node; memory 0 asks for all of it."""

    roles: tuple[str, ...]
    nodes: int
    cpus: int
    gpus_per_node: int
    mem_bytes: int
    partition: str = ""
    account: str = ""
    qos: str = ""
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class HetJobSpec:
    """A whole job: options that all components share, and one Component for each."""

    job_name: str
    time_min: int
    output: str
    components: tuple[Component, ...]
    no_kill: bool = False
    setup: tuple[str, ...] = ()

    @property
    def signal_s(self) -> int:
        """Seconds before the limit at which the supervisor is warned; a short job keeps three quarters of its time."""
        return min(SIGNAL_BEFORE_LIMIT_S, self.time_min * 60 // 4)


def job_spec(config: LibraConfig, plan: Plan, run_dir: Path, attempt: int = 0) -> HetJobSpec:
    """The job of `plan`. Raises JobSpecError, or PlacementError from `desired_steps`."""
    check_path(run_dir)
    steps = desired_steps(config, plan).steps
    last = max(step.component for step in steps)
    if plan.layout == "single" and last > 0:
        raise JobSpecError(f"layout single has one component, the plan places steps on component {last}")
    components = tuple(
        _component(config, index, [s for s in steps if s.component == index]) for index in range(last + 1)
    )
    return HetJobSpec(
        job_name=config.slurm.job_name,
        time_min=config.slurm.time_min,
        output=str(run_dir / "attempts" / str(attempt) / "logs" / "supervisor.log"),
        components=components,
        no_kill=plan.layout == "single",
        setup=tuple(config.launch.setup),
    )


def check_path(run_dir: Path) -> None:
    """Slurm and submitit expand `%`, and Slurm's option parser has no way to quote a line break."""
    if any(character in str(run_dir) for character in "%\n\\\"'"):
        raise JobSpecError(
            f"launch.run_dir={str(run_dir)!r} has a quote, %, backslash or line break; choose another launch.run_dir"
        )


def _component(config: LibraConfig, index: int, steps: list[StepSpec]) -> Component:
    if not steps:
        raise JobSpecError(f"no step of the plan is on component {index}; components are numbered without gaps")
    nodes = max(step.node + step.nodes for step in steps)
    cpus = max(_on_node(steps, node, lambda step: step.tasks_per_node * step.cpus_per_task) for node in range(nodes))
    gpus = max(_on_node(steps, node, lambda step: step.gpus_per_node) for node in range(nodes))
    for wanted, available, option in (
        (cpus, config.hardware.cpus_per_node, "hardware.cpus_per_node"),
        (gpus, config.hardware.gpus_per_node, "hardware.gpus_per_node"),
    ):
        if wanted > available:
            names = ", ".join(step.name for step in steps)
            raise JobSpecError(
                f"a node of component {index} ({names}) wants {wanted}, available {available}; change {option}"
            )
    return Component(
        roles=tuple(dict.fromkeys(step.role for step in steps)),
        nodes=nodes,
        cpus=cpus,
        gpus_per_node=gpus,
        mem_bytes=int(config.slurm.mem_per_node_bytes),
        partition=config.slurm.partition,
        account=config.slurm.account,
        qos=config.slurm.qos,
        extra=tuple(config.slurm.extra),
    )


def _on_node(steps: list[StepSpec], node: int, amount: Callable[[StepSpec], int]) -> int:
    return sum(amount(step) for step in steps if step.node <= node < step.node + step.nodes)


def supervisor_command(python: str, folder: Path) -> str:
    """What the batch shell becomes: submitit loads the pickled supervisor from `folder`."""
    return f"{shlex.quote(python)} -u -m submitit.core._submit {shlex.quote(str(folder))}"


def render(spec: HetJobSpec, command: str) -> str:
    """The text of job.sbatch: a flat list of options and commands. `command` is already quoted for the shell."""
    head = [
        "#!/bin/bash",
        "# Written by `python -m launch`. The supervisor replaces this shell and starts every stage as a step of its own.",
        f"#SBATCH --job-name={shlex.quote(spec.job_name)}",
        f"#SBATCH --time={spec.time_min}",
        f"#SBATCH --output={shlex.quote(spec.output)}",
        "#SBATCH --open-mode=append",
        "#SBATCH --no-requeue",
        f"#SBATCH --signal=B:USR1@{spec.signal_s}",
    ]
    if spec.no_kill:
        head.append("#SBATCH --no-kill")
    body = ["", "set -e", *spec.setup, "srun --version", "export SUBMITIT_EXECUTOR=slurm", f"exec {command}", ""]
    blocks = [_component_lines(index, component) for index, component in enumerate(spec.components)]
    separated = blocks[0] + [line for block in blocks[1:] for line in ["#SBATCH hetjob", *block]]
    return "\n".join(head + separated + body)


def render_job(config: LibraConfig, plan: Plan, run_dir: Path, attempt: int = 0) -> str:
    """job.sbatch: what a real submission of this plan sends, to the letter. Raises JobSpecError, PlacementError."""
    folder = run_dir / "attempts" / str(attempt) / "submitit"
    return render(job_spec(config, plan, run_dir, attempt), supervisor_command(config_python(config), folder))


def config_python(config: LibraConfig) -> str:
    """The interpreter of supervisor and steps."""
    return config.launch.python or sys.executable


def _component_lines(index: int, component: Component) -> list[str]:
    sizes = {
        "nodes": component.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": component.cpus,
        "gpus-per-node": component.gpus_per_node,
        "mem": f"{math.ceil(component.mem_bytes / 2**20)}M" if component.mem_bytes else "0",
    }
    queue = {"partition": component.partition, "account": component.account, "qos": component.qos}
    lines = [f"# component {index}: {' and '.join(component.roles)}"]
    lines += [f"#SBATCH --{key}={shlex.quote(value)}" for key, value in queue.items() if value]
    lines.append("#SBATCH " + " ".join(f"--{key}={value}" for key, value in sizes.items()))
    return lines + [f"#SBATCH {line}" for line in component.extra]
