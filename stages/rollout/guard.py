"""The ASGI middleware in front of every path of the vLLM server.

Why all paths: vLLM's API key covers only some prefixes, and the node is shared with other users, also on loopback. What
it does, in this order: token; our own endpoints under /libra/; nothing else while no proved weights are held; answers
wait while a new version is being proved; answers of /v1/completions say which version generated which token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stages.rollout.errors import NotServingError, OutsideWeightsError, ReloadRefusedError, TooLargeError
from stages.rollout.orders import Order
from stages.rollout.reload import Reloads
from stages.rollout.settings import ServerSettings, read_token_digest
from stages.rollout.versions import Segment
from stages.rundir import OutsideRunError
from traces.recorder import Recorder

MAX_ORDER_BYTES = 64 << 10
COMPLETIONS = "/v1/completions"
OWN_PREFIX = "/libra/"
HARMLESS = frozenset({"/health", "/ping", "/version", "/metrics", "/load"})
"""Paths that answer although no proved weights are held."""

MakeReloads = Callable[[Scope, ServerSettings], tuple[Reloads, Any]]


class GuardMiddleware:
    """vLLM makes it with the inner app alone; settings then come from the environment, the engine from the app's state."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings | None = None, make_reloads: MakeReloads | None = None
    ) -> None:
        self._app = app
        self._settings = settings or ServerSettings.from_environment()
        self._token_digest = read_token_digest(Path(self._settings.token_file))
        self._make_reloads = make_reloads or reloads_of_vllm
        self._made: tuple[Reloads, Any] | None = None
        self._salt = secrets.token_hex(4)
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await _refuse_websocket(receive, send)
        elif not self._is_authorized(scope):
            await _answer(send, 401, {"error": "wanted Authorization: Bearer with this run's token"})
        else:
            await self._admitted(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(token.strip()).digest()
        return hmac.compare_digest(digest, self._token_digest) and scheme.lower() == b"bearer"

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._made is None:
            self._made = self._make_reloads(scope, self._settings)
        reloads, segment_log = self._made
        path: str = scope["path"]
        if path.startswith(OWN_PREFIX):
            await _own_endpoint(reloads, scope, receive, send)
        elif path in HARMLESS:
            await self._app(scope, receive, send)
        else:
            await self._gated(reloads, segment_log, scope, receive, send)

    async def _gated(self, reloads: Reloads, segment_log: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Hold back every piece of an answer while a proof is running. An answer begun before one that fails breaks off."""
        begun = False

        async def send_when_proved(message: Message) -> None:
            nonlocal begun
            await reloads.gate.passed()
            begun = True
            await send(message)

        try:
            reloads.gate.check()
            if scope["path"] == COMPLETIONS and scope["method"] == "POST":
                await self._complete(reloads, segment_log, scope, receive, send_when_proved)
            else:
                await self._app(scope, receive, send_when_proved)
        except NotServingError as error:
            if begun:
                raise ConnectionAbortedError(str(error)) from error
            await _answer(send, 503, {"error": str(error), "kind": "not_serving"})

    async def _complete(self, reloads: Reloads, segment_log: Any, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_requests += 1
        name = f"{self._salt}{self._num_requests:x}"
        request_id = f"cmpl-{name}"
        headers = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
        scope = {**scope, "headers": [*headers, (b"x-request-id", name.encode())]}
        segment_log.follow(request_id)
        try:
            answer = _CompletionAnswer(reloads, send)
            await self._app(scope, receive, answer.take)
            await answer.finish(segment_log.take(request_id))
        finally:
            segment_log.take(request_id)


class _CompletionAnswer:
    """Collects a JSON answer and adds the versions when it is whole; lets a stream pass, piece by piece."""

    def __init__(self, reloads: Reloads, send: Send) -> None:
        self._reloads = reloads
        self._send = send
        self._start: Message | None = None
        self._streams = False
        self._body = bytearray()

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self._streams = not Headers(raw=message["headers"]).get("content-type", "").startswith("application/json")
            if not self._streams:
                return
            await self._reloads.gate.passed()
            MutableHeaders(raw=message["headers"])["x-libra-version"] = str(self._reloads.serving_version)
        if self._streams:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")

    async def finish(self, found: list[list[Segment]]) -> None:
        """Send the collected answer. Raises NotServingError when the gate shut meanwhile."""
        if self._start is None or self._streams:
            return
        body = bytes(self._body)
        if self._start["status"] == 200:
            body = with_segments(body, found)
        await self._reloads.gate.passed()
        headers = MutableHeaders(raw=list(self._start["headers"]))
        headers["content-length"] = str(len(body))
        headers["x-libra-version"] = str(self._reloads.serving_version)
        await self._send({**self._start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})


def with_segments(body: bytes, found: list[list[Segment]]) -> bytes:
    """A /v1/completions answer whose choices carry `version_segments`. Raises ValueError when they do not fit together."""
    answer = msgspec.json.decode(body)
    choices = answer["choices"]
    if len(choices) != len(found):
        raise ValueError(f"vLLM answered with {len(choices)} choices, segments are known of {len(found)} sequences")
    for choice, choice_segments in zip(choices, found, strict=True):
        choice["version_segments"] = choice_segments
    return msgspec.json.encode(answer)


def reloads_of_vllm(scope: Scope, settings: ServerSettings) -> tuple[Reloads, Any]:
    """For the vLLM app of this request; called once, before the first request reaches the engine."""
    from stages.rollout.compat import VllmEngine

    engine = VllmEngine(scope["app"].state.engine_client, settings.start_version)
    recorder = Recorder(
        Path(settings.trace_directory or "."),
        "rollout",
        int(settings.instance.rsplit("_", 1)[1]),
        1,
        f"{settings.instance}.server",
        enabled=bool(settings.trace_directory),
        num_slots=0,  # the agent's spans already stand for these processors
    )
    return Reloads(settings, engine, recorder), engine.segments


async def _own_endpoint(reloads: Reloads, scope: Scope, receive: Receive, send: Send) -> None:
    orders = {"/libra/prepare": reloads.prepare, "/libra/commit": reloads.commit, "/libra/prove": reloads.prove}
    method, path = scope["method"], scope["path"]
    if (method, path) == ("GET", "/libra/state"):
        await _answer(send, 200, reloads.state())
    elif method == "POST" and path in orders:
        try:
            result = await orders[path](Order.from_json(await _read_body(scope, receive)))
            await _answer(send, 200, result)
        except ReloadRefusedError as refusal:
            facts = {"error": str(refusal), "kind": refusal.kind, "tensor": refusal.tensor}
            await _answer(send, refusal.status, facts | reloads.state())
        except OutsideRunError as outside:  # a link among the files of the version, found when they were opened
            facts = {"error": str(outside), "kind": OutsideWeightsError.kind, "tensor": ""}
            await _answer(send, OutsideWeightsError.status, facts | reloads.state())
        except OSError as problem:
            # Of the filesystem, while the version was looked at or read: the order may be given again.
            facts = {"error": f"{type(problem).__name__}: {problem}", "kind": "io_error", "tensor": ""}
            await _answer(send, 500, facts | reloads.state())
    else:
        await _answer(send, 404, {"error": f"no {method} {path}"})


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    """Raises TooLargeError without reading more than the limit."""
    announced = Headers(scope=scope).get("content-length", "0")
    body = b""
    more = True
    while more:
        if len(body) > MAX_ORDER_BYTES or not announced.isdigit() or int(announced) > MAX_ORDER_BYTES:
            raise TooLargeError(f"an order may have at most {MAX_ORDER_BYTES} bytes")
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ReloadRefusedError("the client left before its order was complete")
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _refuse_websocket(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.close", "code": 1008})
