"""People's commands as processes of their own: once, or in a terminal that stays open."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from stages.rundir import RunDir
from tests.fake_runs import until

LIMIT_S = 20.0


def people(command: str, run: RunDir, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"launch.{command}", str(run.root), *words],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def told(run: RunDir) -> tuple[str, int]:
    """(state, exit code) that launch.status tells."""
    done = people("status", run, "--json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["state"], done.returncode


class Terminal:
    """A command that stays, and what it has printed so far."""

    def __init__(self, command: str, run: RunDir, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", f"launch.{command}", str(run.root), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def shows(self, words: str, deadline_s: float = LIMIT_S) -> None:
        try:
            until(lambda: words in self.text, deadline_s, f"{words!r}")
        except AssertionError as late:
            raise AssertionError(f"{late}; it shows:\n{self.text}") from None

    def ctrl_c(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def code(self, deadline_s: float = LIMIT_S) -> int:
        code = self.process.wait(deadline_s)
        self._reader.join(LIMIT_S)
        return code


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(command: str, run: RunDir, *words: str) -> Terminal:
        opened.append(Terminal(command, run, *words))
        return opened[-1]

    yield open_one
    for one in opened:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(LIMIT_S)


Open = Callable[..., Terminal]
