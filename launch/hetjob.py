"""HetJobSpec -> sbatch text. Pure: the same text for a dry run and for a real job.

Slurm's rules behind the layout of the script: options of one component end at `#SBATCH hetjob`; which options carry over to
the next component changes between releases, so every resource option is written for every component, and what one side leaves
out is taken back by an empty value; --output, licenses and mail belong to component 0 only; the batch script runs on the first
node of component 0 only. The supervisor replaces the batch shell (`exec`), otherwise `B:USR1` and scancel would end the shell
and leave the Python child behind.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import LibraConfig
from conf.site import SlurmRoleConfig
from launch.containers import outer_python
from launch.desired_steps import desired_steps
from launch.errors import LibraError
from planner.conflicts.slurm import no_path_for_slurm
from planner.plan import Plan
from stages.desired import StepSpec

__all__ = ["Component", "HetJobSpec", "JobSpecError", "desired_steps", "job_spec", "render", "render_job"]

SIGNAL_BEFORE_LIMIT_S = 120
"""Slurm may send the signal up to 60 s early and, as seen on 22.05, 19 s late."""


class JobSpecError(LibraError, ValueError):
    """The plan or an option cannot be written as a job: the message has wanted, available and the option to change."""

    exit_code = 2


TAKEN_BACK = ("reservation", "exclude")
"""Carried over to the next component (tried on 22.05) unless that gives a value of its own, an empty one included."""


@dataclass(frozen=True)
class Component:
    """One hetjob component (the whole job when the layout is single). Sizes are per node; memory 0 asks for all of it.

    `gpu_flag` is how GPUs are asked for, "none" on a cluster that has none.
    """

    roles: tuple[str, ...]
    nodes: int
    cpus: int
    gpus_per_node: int
    mem_bytes: int
    gpu_flag: str = "gpus-per-node"
    gpu_type: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    exclude: str = ""
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class HetJobSpec:
    """A whole job: options that all components share or only the leader takes, and one Component for each."""

    job_name: str
    time_min: int
    output: str
    components: tuple[Component, ...]
    no_kill: bool = False
    requeue: bool = False
    setup: tuple[str, ...] = ()
    leader: tuple[tuple[str, str], ...] = ()

    @property
    def signal_s(self) -> int:
        """Seconds before the limit at which the supervisor is warned; a short job keeps three quarters of its time."""
        return min(SIGNAL_BEFORE_LIMIT_S, self.time_min * 60 // 4)


def job_spec(
    config: LibraConfig, plan: Plan, run_dir: Path, attempt: int = 0, exclude: Sequence[str] = ()
) -> HetJobSpec:
    """The job of `plan`; `exclude` names nodes that this attempt shall not get, beside those of the configuration.

    Raises JobSpecError, or PlacementError from `desired_steps`.
    """
    check_path(run_dir)
    steps = desired_steps(config, plan).steps
    last = max(step.component for step in steps)
    if plan.layout == "single" and last > 0:
        raise JobSpecError(f"layout single has one component, the plan places steps on component {last}")
    components = tuple(
        _component(config, index, [s for s in steps if s.component == index], _side(config, plan, index), exclude)
        for index in range(last + 1)
    )
    return HetJobSpec(
        job_name=config.slurm.job_name,
        time_min=config.slurm.time_min,
        output=str(run_dir / "attempts" / str(attempt) / "logs" / "supervisor.log"),
        components=components,
        no_kill=plan.layout == "single",
        requeue=config.slurm.requeue in ("auto", "requeue"),
        setup=tuple(config.launch.setup),
        leader=_leader(config),
    )


def _leader(config: LibraConfig) -> tuple[tuple[str, str], ...]:
    slurm = config.slurm
    wanted = {
        "licenses": slurm.licenses,
        "comment": slurm.comment,
        "wckey": slurm.wckey,
        "mail-type": ",".join(slurm.mail_type),
        "mail-user": slurm.mail_user,
    }
    return tuple((name, value) for name, value in wanted.items() if value)


def _side(config: LibraConfig, plan: Plan, index: int) -> SlurmRoleConfig:
    """What the side of this component sets for itself; a single job is neither side's."""
    if plan.layout == "single":
        return SlurmRoleConfig()
    return config.slurm.trainer if index == 0 else config.slurm.rollout


def check_path(run_dir: Path) -> None:
    """Raises JobSpecError; `planner.conflicts.slurm` says the same before anything is made."""
    if unwritable := no_path_for_slurm(str(run_dir)):
        raise JobSpecError(unwritable)


def _component(
    config: LibraConfig, index: int, steps: list[StepSpec], side: SlurmRoleConfig, exclude: Sequence[str]
) -> Component:
    if not steps:
        raise JobSpecError(f"no step of the plan is on component {index}; components are numbered without gaps")
    nodes, cpus, gpus = _size(config, index, steps)
    common = config.slurm
    memory = common.mem_per_node_bytes if side.mem_per_node_bytes is None else side.mem_per_node_bytes
    return Component(
        roles=tuple(dict.fromkeys(step.role for step in steps)),
        nodes=nodes,
        cpus=cpus,
        gpus_per_node=gpus,
        mem_bytes=int(memory),
        gpu_flag=common.gpu_flag,
        gpu_type=side.gpu_type or common.gpu_type,
        partition=side.partition or common.partition,
        account=common.account,
        qos=side.qos or common.qos,
        constraint=side.constraint or common.constraint,
        reservation=side.reservation or common.reservation,
        exclude=",".join(filter(None, (side.exclude or common.exclude, *exclude))),
        extra=tuple(side.extra or common.extra),
    )


def _size(config: LibraConfig, index: int, steps: list[StepSpec]) -> tuple[int, int, int]:
    """(nodes, processors, GPUs) of a component, the last two of its fullest node. Raises JobSpecError."""
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
    return nodes, cpus, gpus


def _gpu_option(component: Component) -> str:
    """ "--gpus-per-node=h100:8", "--gres=gpu:h100:8", or "" where nodes have no GPUs."""
    if component.gpu_flag == "none":
        return ""
    typed = f"{component.gpu_type}:{component.gpus_per_node}" if component.gpu_type else str(component.gpus_per_node)
    return f"--gres=gpu:{typed}" if component.gpu_flag == "gres" else f"--gpus-per-node={typed}"


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
        f"#SBATCH --{'requeue' if spec.requeue else 'no-requeue'}",
        f"#SBATCH --signal=B:USR1@{spec.signal_s}",
    ]
    head += [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in spec.leader]
    if spec.no_kill:
        head.append("#SBATCH --no-kill")
    body = ["", "set -e", *spec.setup, "srun --version", "export SUBMITIT_EXECUTOR=slurm", f"exec {command}", ""]
    blocks = [_component_lines(spec.components, index) for index in range(len(spec.components))]
    separated = blocks[0] + [line for block in blocks[1:] for line in ["#SBATCH hetjob", *block]]
    return "\n".join(head + separated + body)


def render_job(config: LibraConfig, plan: Plan, run_dir: Path, attempt: int = 0, exclude: Sequence[str] = ()) -> str:
    """job.sbatch: what a real submission of this plan sends, to the letter. Raises JobSpecError, PlacementError."""
    folder = run_dir / "attempts" / str(attempt) / "submitit"
    spec = job_spec(config, plan, run_dir, attempt, exclude)
    return render(spec, supervisor_command(outer_python(config), folder))


def config_python(config: LibraConfig) -> str:
    """The interpreter of the steps."""
    return config.launch.python or sys.executable


def _component_lines(components: Sequence[Component], index: int) -> list[str]:
    component = components[index]
    lines = [f"# component {index}: {' and '.join(component.roles)}"]
    for name in ("partition", "account", "qos", "constraint", "reservation", "exclude"):
        value = getattr(component, name)
        is_carried = name in TAKEN_BACK and any(getattr(before, name) for before in components[:index])
        if value or is_carried:
            lines.append(f"#SBATCH --{name}={shlex.quote(value) if value else ''}")
    sizes = {
        "nodes": component.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": component.cpus,
        "mem": f"{math.ceil(component.mem_bytes / 2**20)}M" if component.mem_bytes else "0",
    }
    words = [f"--{key}={value}" for key, value in sizes.items()]
    lines.append(" ".join(["#SBATCH", *words[:3], *filter(None, [_gpu_option(component)]), *words[3:]]))
    return lines + [f"#SBATCH {line}" for line in component.extra]
