"""Run pip: its whole output goes to a log file, a short progress line to the user, its last lines into the error."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from stages.process import die_with_parent

DEADLINE_S = 3600
TAIL_LINES = 25
REPORT_EVERY = 40


class PipError(Exception):
    """pip failed; `tail` has its last lines."""

    def __init__(self, tail: str) -> None:
        super().__init__(tail)
        self.tail = tail


def run_pip(venv: Path, arguments: list[str], log: Path, total: int = 0) -> None:
    """Raises PipError when pip fails or takes more than DEADLINE_S. `total`: packages expected, for the progress."""
    command = [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with (
        log.open("a") as copy,
        subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A pip that outlived us would go on writing into an environment that the next set-up deletes.
            preexec_fn=die_with_parent,
        ) as pip,
    ):
        assert pip.stdout is not None
        watchdog = threading.Timer(DEADLINE_S, pip.kill)
        watchdog.start()
        report = progress_reporter(total)
        try:
            for line in pip.stdout:
                copy.write(line)
                tail.append(line.rstrip())
                report(line)
        finally:
            watchdog.cancel()
    if pip.returncode != 0:
        raise PipError("\n".join(tail))


def progress_reporter(total: int) -> Callable[[str], None]:
    """A function of pip's lines that prints how far it is: in place on a terminal, else now and then."""
    seen = 0
    in_place = sys.stdout.isatty()

    def report(line: str) -> None:
        nonlocal seen
        if total and line.startswith(("Collecting ", "Requirement already satisfied", "Processing ")):
            seen += 1
            if in_place:
                print(f"\r  {seen} of {total} packages fetched", end="", flush=True)
            elif seen % REPORT_EVERY == 0 or seen == total:
                print(f"  {seen} of {total} packages fetched", flush=True)
        elif total and line.startswith("Installing collected packages"):
            print(f"{chr(10) if in_place else ''}  unpacking", flush=True)

    return report
