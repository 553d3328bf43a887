"""The product's guard, and behind it one path for comparison: vLLM's own reload of a folder, paused all the time."""

from __future__ import annotations

import json
import time
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from stages.rollout.guard import GuardMiddleware, reloads_of_vllm
from stages.rollout.reload import Reloads
from stages.rollout.settings import ServerSettings

RELOAD_PATH = "/benchmark/vllm_reload"


class BenchmarkGuard(GuardMiddleware):
    """POST RELOAD_PATH {"folder": of a HF model, "token_ids": of a probe}; without token it is refused like all the rest."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, make_reloads=self._remember)
        self._client: Any = None

    def _remember(self, scope: Scope, settings: ServerSettings) -> tuple[Reloads, Any]:
        self._client = scope["app"].state.engine_client
        return reloads_of_vllm(scope, settings)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != RELOAD_PATH or self._made is None:
            await super()._admitted(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        order = json.loads(body)
        answer = await self._reload(self._made[0]._engine, order["folder"], tuple(order["token_ids"]))
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _reload(self, engine: Any, folder: str, token_ids: tuple[int, ...]) -> dict[str, Any]:
        """As the product's commit, with vLLM's reload in place of the swap; seconds, and log-probs of the probe."""
        began_s = time.monotonic()
        paused_s = await engine.pause()
        await self._client.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        loaded_s = time.monotonic()
        await engine.reset_caches()
        queued = await engine.submit(token_ids, logprobs=True)
        await engine.resume()
        resumed_s = time.monotonic()
        answer = await queued
        return {
            "pause_s": paused_s - began_s,
            "reload_s": loaded_s - paused_s,
            "generation_paused_s": resumed_s - began_s,
            "paused_s": time.monotonic() - began_s,
            "logprobs": answer.logprobs,
        }
