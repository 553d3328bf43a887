"""Short commands with a deadline, whose answer is wanted whatever it is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from launch.scrub import scrubbed

COMMAND_DEADLINE_S = 20.0
NOT_FOUND = 127
TIMED_OUT = 124
"""The shell's code for a missing program, and timeout(1)'s for one that took too long."""


@dataclass(frozen=True)
class Answer:
    code: int
    out: str = ""
    err: str = ""

    @property
    def is_ok(self) -> bool:
        return self.code == 0

    @property
    def words(self) -> str:
        """What it printed, on one line; errors first."""
        return " ".join((self.err.strip() or self.out.strip()).split())


def ask(arguments: Sequence[str], deadline_s: float = COMMAND_DEADLINE_S) -> Answer:
    """Run a command without the variables of an outer job. Never raises for what the command does."""
    try:
        done = subprocess.run(
            list(arguments),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            env=scrubbed(os.environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(TIMED_OUT, err=f"{arguments[0]} did not answer within {deadline_s:g} s")
    except (FileNotFoundError, PermissionError) as error:
        return Answer(NOT_FOUND, err=f"{arguments[0]}: {error.strerror}")
    return Answer(done.returncode, done.stdout, done.stderr)
