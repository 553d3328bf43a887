"""Decide whether an environment is what the lock file asks for, without starting its Python."""

from __future__ import annotations

import configparser
import hashlib
import os
import sys
from pathlib import Path

# What an installation depends on, besides the packaging sections of setup.cfg. A change in any of them installs again
# (in seconds, when little differs).
INPUTS = ("requirements/cpu.lock", "pyproject.toml")
PACKAGING_SECTIONS = ("metadata", "options")
STAMP = "libra-installed"
UNFINISHED = "libra-unfinished"


def fingerprint(project: Path) -> str:
    """Digest of the inputs, this Python's version, and the project's path (an editable install points at it)."""
    digest = hashlib.sha256()
    for name in INPUTS:
        digest.update((project / name).read_bytes() + b"\0")
    digest.update(repr(_packaging(project / "setup.cfg")).encode())
    digest.update(f"{sys.version_info.major}.{sys.version_info.minor}\0{project}".encode())
    return digest.hexdigest()


def _packaging(setup_cfg: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """The sections that say what gets installed: setup.cfg also holds the settings of test tools."""
    config = configparser.RawConfigParser()
    config.read_string(setup_cfg.read_text())
    return [(name, config.items(name)) for name in config.sections() if name.partition(".")[0] in PACKAGING_SECTIONS]


def is_current(venv: Path, wanted: str) -> bool:
    stamp = venv / STAMP
    return os.access(venv / "bin/python", os.X_OK) and stamp.is_file() and stamp.read_text().strip() == wanted


def is_unfinished(venv: Path) -> bool:
    """Whether an earlier installation was interrupted: pip may have left half a package, which it takes for a whole."""
    return (venv / UNFINISHED).exists()


def begin(venv: Path) -> None:
    (venv / STAMP).unlink(missing_ok=True)
    (venv / UNFINISHED).touch()


def finish(venv: Path, wanted: str) -> None:
    """The stamp comes last, and whole: without it the next run installs again."""
    draft = venv / f"{STAMP}.tmp"
    draft.write_text(wanted + "\n")
    os.replace(draft, venv / STAMP)
    (venv / UNFINISHED).unlink(missing_ok=True)
