"""Tasks by name. A user adds one with a class and a YAML file.

The class derives from `stages.controller.tasks.base.Task` and lives anywhere that Python can import; the YAML file in
conf/task names it as `name: my_package.my_module:MyTask`, or by a short name listed here.
"""

from __future__ import annotations

import difflib
import importlib
import inspect

from conf.sections import TaskConfig
from stages.controller.tasks.base import Problem, Task, TaskError

__all__ = ["Problem", "Task", "TaskError", "make_task"]

TASKS = {"reasoning_gym": "stages.controller.tasks.reasoning_gym:ReasoningGymTask"}


def make_task(config: TaskConfig, *, seed: int) -> Task:
    """The configured task. Raises TaskError for an unknown name (naming the nearest) or unknown parameters."""
    kind = _find(config.name)
    accepted = [name for name in inspect.signature(kind).parameters if name not in ("seed", "test_size")]
    for name in config.params:
        if name not in accepted:
            raise TaskError(
                f"task.params.{name} is not a parameter of task {config.name}{_nearest(name, accepted)}; "
                f"it takes {', '.join(accepted) or 'none'}"
            )
    try:
        return kind(seed=seed, test_size=config.test_size, **config.params)
    except TypeError as error:
        raise TaskError(f"task {config.name} can not be made from task.params: {error}") from error


def _find(name: str) -> type[Task]:
    target = TASKS.get(name, name)
    module_name, _, class_name = target.partition(":")
    if not class_name:
        raise TaskError(
            f"task.name {name!r} is not known{_nearest(name, list(TASKS))}; "
            f"known: {', '.join(sorted(TASKS))}, or give package.module:Class"
        )
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise TaskError(f"task.name {name!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise TaskError(f"task.name {name!r} is not a subclass of stages.controller.tasks.base.Task")
    return kind


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
