"""What the tests of the guard share: a tiny app in place of vLLM's, an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from stages.rollout.guard import GuardMiddleware
from stages.rollout.orders import Order
from stages.rollout.reload import Reloads
from stages.rollout.settings import ServerSettings
from stages.rollout.versions import Segment, VersionTimeline
from stages.rundir import RunDir
from stages.weights.manifest import Manifest
from tests.weights_kit import PROBE
from traces.recorder import Recorder

TOKEN = "t" * 40
GENERATION = {"model": "policy", "prompt": [[1, 2]], "max_tokens": 2}


@dataclass(frozen=True)
class Answer:
    logprobs: list[float]
    cached_tokens: int = 0


@dataclass
class FakeEngine:
    """Says what it is told to say; `log` holds what was asked of it, in order."""

    timeline: VersionTimeline = field(default_factory=lambda: VersionTimeline(0))
    log: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=lambda: list(PROBE.logprobs))
    cached_tokens: int = 0
    read_error: tuple[str, str] = ("", "")
    swap_error: str = ""
    swap_fault: str = ""
    reading: asyncio.Event | None = None
    proving: asyncio.Event | None = None
    seeding: asyncio.Event | None = None
    moments: float = 0.0

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        self.log.append(method)
        if method == "libra_prepared":
            error, tensor = self.read_error
            done = self.reading is None or self.reading.is_set()
            return [{"done": done, "error": error, "tensor": tensor}]
        if method == "libra_swap" and self.swap_error:
            raise RuntimeError(self.swap_error)
        return [{"fault": self.swap_fault, "tensor": "model.embed" if self.swap_fault else ""}]

    async def pause(self) -> float:
        self.log.append("pause")
        self.moments += 1.0
        return self.moments

    async def resume(self) -> None:
        self.log.append("resume")

    async def reset_caches(self) -> None:
        self.log.append("reset_caches")

    def canary(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return token_ids * 2

    async def submit(self, token_ids: tuple[int, ...], *, logprobs: bool) -> Awaitable[Answer]:
        self.log.append("probe" if logprobs else "canary")

        async def answer() -> Answer:
            waited_for = self.proving if logprobs else self.seeding
            if waited_for is not None:
                await waited_for.wait()
            return Answer(self.logprobs) if logprobs else Answer([], self.cached_tokens)

        return answer()


@dataclass
class FakeLog:
    """Segments that the next completion is said to have."""

    found: list[list[Segment]] = field(default_factory=lambda: [[[0, 2]]])
    followed: list[str] = field(default_factory=list)

    def follow(self, request_id: str) -> None:
        self.followed.append(request_id)

    def take(self, request_id: str) -> list[list[Segment]]:
        return self.found


@dataclass
class Guarded:
    run: RunDir
    engine: FakeEngine
    segment_log: FakeLog
    reloads: Reloads
    client: httpx.AsyncClient
    app: Starlette

    def order(self, manifest: Manifest, **changes: Any) -> dict[str, Any]:
        path = f"weights/v{manifest.version:06d}"
        order = Order(self.run.run_id, self.run.attempt, manifest.version, path, manifest.digest, "inplace", 5.0)
        return {**asdict(order), **changes}

    async def give(self, what: str, order: dict[str, Any]) -> httpx.Response:
        # json= would refuse, here, texts that a server must refuse.
        return await self.client.post(f"/libra/{what}", content=json.dumps(order).encode())

    async def refresh(self, manifest: Manifest) -> httpx.Response:
        prepared = await self.give("prepare", self.order(manifest))
        assert prepared.status_code == 200, prepared.text
        return await self.give("commit", self.order(manifest))

    async def generate(self) -> httpx.Response:
        return await self.client.post("/v1/completions", json=GENERATION)


async def _complete(request: Request) -> Response:
    body = await request.json()
    if body.get("stream"):

        async def pieces() -> AsyncIterator[str]:
            for piece in ("one", "two"):
                yield piece
                await request.app.state.between.wait()

        return StreamingResponse(pieces(), media_type="text/event-stream")
    choices = [{"index": 0, "text": "", "token_ids": [7, 8]}]
    return JSONResponse({"id": request.headers["x-request-id"], "choices": choices})


async def _ok(_request: Request) -> Response:
    return PlainTextResponse("ok")


def settings_of(run: RunDir, **changes: Any) -> ServerSettings:
    settings = ServerSettings(
        run_root=str(run.root),
        run_id=run.run_id,
        attempt=run.attempt,
        instance="rollout_000",
        token_file=str(run.token_file),
        start_folder=str(run.weights_version(0)),
        start_version=0,
        serve_unproved=False,
        weights_dtype="float32",
        proof_tolerance=1e-3,
        agent_pid=os.getpid(),
        listen_fd=-1,
    )
    return replace(settings, **changes)


def guard(run: RunDir, **changes: Any) -> Guarded:
    settings = settings_of(run, **changes)
    engine, segment_log = FakeEngine(), FakeLog()
    recorder = Recorder(run.traces, "rollout", 0, 1, "rollout_000.server", enabled=False)
    reloads = Reloads(settings, engine, recorder)
    routes = [
        Route("/v1/completions", _complete, methods=["POST"]),
        Route("/health", _ok),
        Route("/v1/chat/completions", _ok, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    app.state.between = asyncio.Event()
    app.state.between.set()
    app.add_middleware(
        GuardMiddleware, settings=settings, make_reloads=lambda _scope, _settings: (reloads, segment_log)
    )
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://server", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    return Guarded(run, engine, segment_log, reloads, client, app)


def in_loop(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(bounded())


def run_with_token(folder: Path) -> RunDir:
    made = RunDir.create(folder)
    made.token_file.touch(mode=0o600)
    made.token_file.write_text(TOKEN + "\n")
    return replace(made, writer="trainer")
