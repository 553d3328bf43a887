"""A job that Slurm took and whose launcher ended before it had written down the number: only Slurm still knows of it.

squeue shows the script that a job was submitted with, and the names of submitit's scripts are unique.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from launch import slurm

FORMAT = "%i|%o"
_LINE = re.compile(r"^\s*(\d+)(?:\+\d+)?\|(.*)$")
_SCRIPT = re.compile(r"^\.submission_file_\w+\.sh$")
"""What submitit writes right before sbatch. It stays, as a link, once the number is known."""


def scripts(submitit: Path) -> list[str]:
    """Names of the scripts in `submitit` (RUN/attempts/N/submitit): empty when sbatch has certainly not been called."""
    try:
        with os.scandir(submitit) as entries:
            return [entry.name for entry in entries if _SCRIPT.match(entry.name)]
    except OSError:
        return []


def find(folders: Iterable[Path]) -> dict[Path, str]:
    """Folder of scripts -> leader's id of the job that was submitted with one of them, while Slurm knows such a job.

    Raises SlurmCommandError.
    """
    wanted = {name: folder for folder in folders for name in scripts(folder)}
    if not wanted:
        return {}
    text = slurm.command(["squeue", "-h", "-t", "all", "-u", str(os.getuid()), "-o", FORMAT])
    found: dict[Path, int] = {}
    for match in filter(None, map(_LINE.match, text.splitlines())):
        folder = wanted.get(os.path.basename(match[2].strip()))
        if folder is not None:
            found[folder] = max(int(match[1]), found.get(folder, 0))
    return {folder: str(job_id) for folder, job_id in found.items()}
