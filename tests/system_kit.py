"""Whole runs through `python -m launch`, as a user starts them: real vLLM, real trainer, real Slurm where asked."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from launch.steps import STEP_ID_VARIABLE
from stages.files import list_names, read_json
from tests.network_kit import descendants, listening

START_DEADLINE_S = 240.0
DEATH_DEADLINE_S = 15.0


@dataclass
class SystemRun:
    """A launcher process and the run directory that it fills."""

    run_dir: Path
    process: subprocess.Popen[str]
    ports: set[int] = field(default_factory=set)
    listening: set[tuple[str, int]] = field(default_factory=set)
    command_lines: list[str] = field(default_factory=list)

    def wait_until(self, what: str, look: Callable[[], Any], deadline_s: float = START_DEADLINE_S) -> Any:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            found = look()
            if found:
                return found
            if self.process.poll() is not None:
                raise AssertionError(f"the launcher ended ({self.process.returncode}) before {what}:\n{self.output()}")
            time.sleep(0.05)
        raise AssertionError(f"{what} did not come within {deadline_s} s")

    def record(self, name: str) -> dict[str, Any]:
        return read_json(self.run_dir / name) or {}

    def wait_for_step(self, step: int) -> None:
        """Until optimizer step `step` (from 0) was trained: every stage has worked by then."""
        self.wait_until(f"step {step}", lambda: (self.run_dir / f"batches/step_{step:06d}/trained.json").exists())
        self.note_ports()
        self.note_what_others_see()

    def note_what_others_see(self) -> None:
        """What every user of the machine can look at: addresses on which the run's processes listen, their command lines."""
        run_id = self.record("run.json")["run_id"]
        pids = [pid for pid, mark in marked_processes() if mark.startswith(f"{run_id}.")] + descendants(
            self.process.pid
        )
        self.listening |= listening(pids)
        self.command_lines += [command_line(pid) for pid in pids]

    def newest_step(self) -> int:
        """The newest step (from 0) that was trained, or -1."""
        names = [path.parent.name for path in self.run_dir.glob("batches/step_*/trained.json")]
        return max((int(name.removeprefix("step_")) for name in names), default=-1)

    def newest_checkpoint(self) -> int:
        return max(int(name.removeprefix("step_")) for name in list_names(self.run_dir / "checkpoints"))

    def newest_version(self) -> int:
        return int(self.record("weights/LATEST.json")["version"])

    def instance(self, name: str) -> dict[str, Any]:
        return self.record(f"instances/{name}.json")

    def dropped(self) -> set[str]:
        """Why groups were asked again, over all ledger files."""
        lines = [line for path in self.run_dir.glob("ledger/*.jsonl") for line in path.read_text().splitlines()]
        return {record["reason"] for record in map(json.loads, lines) if record["event"] == "dropped"}

    def end(self) -> None:
        """Ctrl-C, and the end of the launcher."""
        self.note_ports()
        self.process.send_signal(signal.SIGINT)
        self.wait(2 * DEATH_DEADLINE_S)

    def note_ports(self) -> None:
        for name in list_names(self.run_dir / "instances"):
            url = self.record(f"instances/{name}").get("base_url")
            if url:
                self.ports.add(int(urlparse(url).port or 0))

    def wait(self, deadline_s: float) -> int:
        return self.process.wait(timeout=deadline_s)

    def output(self) -> str:
        return (self.run_dir.parent / f"{self.run_dir.name}.out").read_text()

    def stage_pids(self, name: str) -> list[int]:
        """Processes of one step by the mark that the supervisor gives them, oldest first."""
        run_id = self.record("run.json")["run_id"]
        return sorted(
            pid
            for pid, mark in marked_processes()
            if mark.startswith(f"{run_id}.") and mark.rstrip("/").split(".")[2] == name
        )

    def leftovers(self) -> list[str]:
        """Living processes that belong to this run: by their mark, or by the run directory in their command line."""
        run_id = self.record("run.json")["run_id"]
        marked = [f"{pid} {command_line(pid)}" for pid, mark in marked_processes() if mark.startswith(f"{run_id}.")]
        named = [f"{pid} {command_line(pid)}" for pid in all_pids() if str(self.run_dir) in command_line(pid)]
        return sorted({*marked, *named})

    def open_ports(self) -> list[int]:
        return sorted(port for port in self.ports if is_listening(port))

    def assert_nothing_is_left(self, deadline_s: float = 10.0) -> None:
        end = time.monotonic() + deadline_s
        while self.leftovers() and time.monotonic() < end:
            time.sleep(0.1)
        assert self.leftovers() == []
        assert self.open_ports() == []


def all_pids() -> Iterator[int]:
    mine = os.getpid()
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != mine)


def marked_processes() -> Iterator[tuple[int, str]]:
    for pid in all_pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        for entry in environment.split(b"\0"):
            if entry.startswith(f"{STEP_ID_VARIABLE}=".encode()):
                yield pid, entry.partition(b"=")[2].decode()


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def launched(run_dir: Path, *overrides: str, env: dict[str, str] | None = None) -> Iterator[SystemRun]:
    """Start `python -m launch +experiment=demo`; whatever the test does, the launcher is gone afterwards."""
    command = [sys.executable, "-m", "launch", "+experiment=demo", f"launch.run_dir={run_dir}", *overrides]
    with open(run_dir.parent / f"{run_dir.name}.out", "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, env=env)
        try:
            yield SystemRun(run_dir, process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(timeout=20)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
