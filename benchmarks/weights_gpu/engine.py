"""The engine's side: an agent process with its vLLM server, and the process that keeps it busy."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.weights_gpu.agent import INSTANCE
from benchmarks.weights_gpu.guard import RELOAD_PATH
from benchmarks.weights_gpu.load import Counts, Load
from stages.files import read_json, wait_for
from stages.process import INCARNATION_VARIABLE
from stages.rundir import RunDir
from stages.weights.instances import InstanceStatus, read_status

REPOSITORY = Path(__file__).parents[2]
STOP_S = 30.0
BUSY_S = 60.0
_TAIL_BYTES = 6000


class EngineEndedError(RuntimeError):
    """The agent or the load is gone."""


class Instance:
    """One rollout instance, started again when it is gone. Logs are in `folder`; main thread only: children die with it."""

    def __init__(self, run: RunDir, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._agent: subprocess.Popen[bytes] | None = None
        self._load: subprocess.Popen[bytes] | None = None
        self._starts = -1
        self._counts = folder / "counts.json"

    # ---- the agent -----------------------------------------------------------------------------------------------

    def ensure_ready(self, limit_s: float) -> float:
        """Start the instance unless it runs and waits for requests; seconds that it took."""
        began_s = time.monotonic()
        if not self.is_ready:
            self.stop()
            self._starts += 1
            self._agent = self._spawn("agent", [str(self._run.root)])
            wait_for(
                lambda: self.is_ready or None,
                deadline_s=limit_s,
                awaited="a ready instance",
                from_whom="the agent",
                check=self.check,
            )
        return time.monotonic() - began_s

    @property
    def status(self) -> InstanceStatus | None:
        return read_status(self._run, INSTANCE)

    @property
    def is_ready(self) -> bool:
        if self._agent is None or self._agent.poll() is not None:
            return False
        status = self.status
        return status is not None and (status.state, status.incarnation) == ("ready", self._starts)

    def check(self) -> None:
        """Raises EngineEndedError."""
        if self._agent is None or self._agent.poll() is not None:
            raise EngineEndedError(f"the agent ended: {self._agent and self._agent.returncode}")

    def stop(self) -> None:
        self.stop_load()
        _end(self._agent)
        self._agent = None

    # ---- the load ------------------------------------------------------------------------------------------------

    def ensure_busy(self, load: Load) -> None:
        """Keep `load` on the instance; returns when all of it is in flight, and something of it was answered."""
        if self._load is None or self._load.poll() is not None:
            self._counts.unlink(missing_ok=True)
            self._load = self._spawn("load", [str(self._run.root), str(self._counts), *load.arguments()])
        wait_for(
            lambda: (self.counts.in_flight >= load.requests and self.counts.finished > 0) or None,
            deadline_s=BUSY_S,
            awaited="requests in flight",
            from_whom="the load",
            check=self._check_load,
        )

    @property
    def counts(self) -> Counts:
        return Counts(**(read_json(self._counts) or {}))

    def stop_load(self) -> None:
        _end(self._load)
        self._load = None
        self._counts.unlink(missing_ok=True)

    def _check_load(self) -> None:
        self.check()
        if self._load is None or self._load.poll() is not None:
            raise EngineEndedError(f"the load ended: {self._load and self._load.returncode}")

    # ---- vLLM's own reload ---------------------------------------------------------------------------------------

    def vllm_reload(self, folder: Path, token_ids: tuple[int, ...], timeout_s: float) -> dict[str, Any]:
        """See `BenchmarkGuard`. Raises EngineEndedError for an answer that is none."""
        status = self.status
        if status is None:
            raise EngineEndedError("the instance has not registered")
        token = self._run.token_file.read_text(encoding="ascii").strip()
        connection = http.client.HTTPConnection(str(urlsplit(status.base_url).netloc), timeout=timeout_s)
        try:
            body = json.dumps({"folder": str(folder), "token_ids": token_ids})
            connection.request("POST", RELOAD_PATH, body, {"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        finally:
            connection.close()
        if response.status != 200:
            raise EngineEndedError(f"vLLM's reload answered {response.status}: {text[:2000]}")
        return dict(json.loads(text))

    # ---- processes -----------------------------------------------------------------------------------------------

    def _spawn(self, what: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{what}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.weights_gpu.{what}", *arguments],
                cwd=REPOSITORY,
                env={**os.environ, INCARNATION_VARIABLE: str(max(self._starts, 0))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log_tails(self) -> str:
        logs = (self._run.logs / f"{INSTANCE}.server.log", self._folder / "agent.log", self._folder / "load.log")
        return "\n".join(f"---- end of {path} ----\n{_tail(path)}" for path in logs)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    """TERM, patience, KILL; then the process is gone."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)


def _tail(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return "(there is none)"
    return data[-_TAIL_BYTES:].decode(errors="replace")
