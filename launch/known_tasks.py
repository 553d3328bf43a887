"""What was learnt of a task by making it: its library is imported for that, which takes reasoning-gym a second.

The answer is kept in launch.cache_dir for tasks that could be made, and holds for the same parameters, the same file of the task's
class and an environment in which nothing was installed since (installing changes the folder of packages). The controller makes
the task again anyway: what is remembered here only spares the launcher the time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from conf.schema import LibraConfig
from stages.files import make_directory, read_json, write_bytes_atomic

MOST = 100
"""Tasks that are remembered; the oldest go first."""


def remembered(config: LibraConfig) -> bool | None:
    """Does the task put prompts through a chat template? None when it is not known."""
    key = _key(config)
    found = _read(_file(config)).get(key) if key else None
    return found if isinstance(found, bool) else None


def remember(config: LibraConfig, *, chat: bool) -> None:
    """A folder that cannot be written costs the second again next time, nothing else."""
    file, key = _file(config), _key(config)
    if not key:
        return
    known = _read(file)
    known.pop(key, None)
    known[key] = chat
    kept = dict(list(known.items())[-MOST:])
    try:
        make_directory(file.parent)
        write_bytes_atomic(file, json.dumps(kept, indent=1).encode())
    except OSError:
        return


def _file(config: LibraConfig) -> Path:
    return Path(config.launch.cache_dir) / "tasks.json"


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json(file) or {}
    except (OSError, ValueError):
        return {}  # damaged: made anew with the next task


def _key(config: LibraConfig) -> str:
    """Changes with whatever could change the answer; "" where that cannot be told, or nothing can be kept."""
    from stages.controller.tasks import TASKS

    task = config.task
    if not config.launch.cache_dir:
        return ""
    module = TASKS.get(task.name, task.name).partition(":")[0]
    packages = sysconfig.get_path("purelib")
    try:
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).read_bytes() if spec and spec.origin else b""
        installed_ns = os.stat(packages).st_mtime_ns
        wanted = json.dumps(
            [task.name, task.params, task.test_size, packages, installed_ns, sys.version], sort_keys=True
        )
    except (ImportError, OSError, TypeError, ValueError):
        return ""
    return hashlib.sha256(wanted.encode() + b"\0" + source).hexdigest() if source else ""
