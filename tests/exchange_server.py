"""What stands in for parts of a rollout instance in `tests.exchange_world`: the engine, HTTP, threads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch

from stages.context import StageContext
from stages.rollout.agent import StartPoint
from stages.rollout.client import GuardAnswer
from stages.rollout.guard import _own_endpoint
from stages.rollout.orders import Order
from stages.rollout.registration import Registration
from stages.rollout.reload import Reloads
from stages.rollout.settings import ServerSettings
from stages.rundir import RunDir
from stages.weights.errors import WeightsError
from stages.weights.reader import load_manifest, read_verified
from tests.interleaving import Party


def says(value: float) -> tuple[float, float]:
    """Log-probs of an engine that holds `value`."""
    return (-value, -value / 2)


class InlinePool:
    """Does at once, in the caller's thread, what a ThreadPoolExecutor would do."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 (as an executor does)
            future.set_exception(error)
        return future

    def shutdown(self) -> None: ...


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class QuietRegistration(Registration):
    """Beats in the agent's own thread."""

    beat_s = float("-inf")

    def __enter__(self) -> Registration:
        self.update()
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, **changes: Any) -> None:
        super().update(**changes)
        self.beat_s = time.monotonic()


class Engine:
    """In place of vLLM: holds one number."""

    def __init__(self, folder: Path, keeps_old: bool = False) -> None:
        self.timeline: Any = SimpleNamespace(switch=lambda version, moment: None)  # the clock stands still
        self.reading = ""
        self.keeps_old = keeps_old
        (tensor,) = safetensors.torch.load_file(next(folder.glob("*.safetensors"))).values()
        self.value = float(tensor[0])
        self._staged, self._error = 0.0, ""

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        if method == "libra_prepare":
            self._prepare(RunDir(Path(arguments[0]), *arguments[1:4]), *arguments[4:6])
        elif method == "libra_prepared":
            return [{"done": True, "error": self._error, "tensor": ""}]
        elif method == "libra_swap" and not self.keeps_old:
            self.value = self._staged
        return [{"fault": "", "tensor": ""}]

    def _prepare(self, run: RunDir, version: int, digest: str) -> None:
        self._error = ""
        try:
            manifest = load_manifest(run, version, digest)
            self.reading = digest
            self._staged = float(read_verified(run, manifest, threads=1)["model.value"][0])
        except (WeightsError, OSError) as error:
            self._error = str(error)
        finally:
            self.reading = ""

    async def pause(self) -> float:
        return time.monotonic()

    async def resume(self) -> None: ...

    async def reset_caches(self) -> None: ...

    def canary(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    async def submit(self, token_ids: tuple[int, ...], *, logprobs: bool) -> Awaitable[Any]:
        async def answer() -> SimpleNamespace:
            return SimpleNamespace(logprobs=list(says(self.value)), cached_tokens=0)

        return answer()


class Server:
    """In place of the agent's `ServerKeeper`: the server's state machine in the agent's own thread.

    `servers` are those that live, by attempt and instance; `proved` is told what each has proved.
    """

    server = SimpleNamespace(base_url="http://127.0.0.1:1", pid=1)
    # All is read by the engine, and nothing ahead.
    reader = SimpleNamespace(reading=lambda version, digest, **_: nullcontext(), look_ahead=lambda newer_than: None)

    def __init__(
        self,
        context: StageContext,
        registration: QuietRegistration,
        party: Party,
        *,
        servers: dict[tuple[int, str], Server],
        proved: set[tuple[int, str, str]],
        keeps_old: bool,
    ) -> None:
        self._context, self._registration, self._servers, self._proved = context, registration, servers, proved
        self._keeps_old = keeps_old
        self._loop = asyncio.new_event_loop()
        self.party = party

    def start(self, start: StartPoint) -> None:
        run = self._context.run
        settings = ServerSettings(
            str(run.root), run.run_id, run.attempt, self._context.name, "", str(start.folder), start.version,
            False, "float32", 1e-3, 1, -1,
        )  # fmt: skip
        self.engine = Engine(start.folder, self._keeps_old)
        self.reloads = Reloads(settings, self.engine, self._context.recorder)
        self._servers[run.attempt, self._context.name] = self
        self._registration.update(base_url=self.server.base_url)

    def stop(self) -> None: ...

    def close(self) -> None:
        self._servers.pop((self._context.run.attempt, self._context.name), None)
        self._loop.close()

    def pause(self, timeout_s: float) -> None:
        self._context.check_stop()
        self._registration.check()
        if timeout_s:
            time.sleep(timeout_s)
            if time.monotonic() - self._registration.beat_s >= self._context.config.rollout.heartbeat_interval_s:
                self._registration.update()

    def order(self, order: Order, what: str) -> GuardAnswer:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(vars(order)).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": f"/libra/{what}", "headers": []}
        self._loop.run_until_complete(_own_endpoint(self.reloads, scope, receive, send))
        proved = self.reloads.proved
        if proved is not None:
            self._proved.add((self._context.run.attempt, self._context.name, proved.digest))
        return GuardAnswer(sent[0]["status"], json.loads(sent[1]["body"]))
