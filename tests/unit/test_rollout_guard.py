"""Attempts to get past the guard, and what it adds to answers; with a tiny app in place of vLLM's and a fake engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from stages.rollout.errors import UnguardedTokenError
from stages.rollout.guard import MAX_ORDER_BYTES, GuardMiddleware, with_segments
from stages.rollout.orders import Order
from stages.rollout.reload import Reloads
from stages.rollout.settings import ServerSettings
from stages.rollout.versions import Segment, VersionTimeline
from stages.rundir import RunDir
from stages.weights.manifest import Manifest
from tests.weights_kit import PROBE, publish_full, small_tensors
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
    reading: asyncio.Event | None = None
    proving: asyncio.Event | None = None
    moments: float = 0.0

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        self.log.append(method)
        if method == "libra_prepared":
            error, tensor = self.read_error
            done = self.reading is None or self.reading.is_set()
            return [{"done": done, "error": error, "tensor": tensor}]
        if method == "libra_swap" and self.swap_error:
            raise RuntimeError(self.swap_error)
        return [{}]

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
            if logprobs and self.proving is not None:
                await self.proving.wait()
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
        return await self.client.post(f"/libra/{what}", json=order)

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


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "run")
    made.token_file.touch(mode=0o600)
    made.token_file.write_text(TOKEN + "\n")
    return replace(made, writer="trainer")


@pytest.fixture
def v0(run: RunDir) -> Manifest:
    return publish_full(run, 0)


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


# ---- the token -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer " + "x" * 40},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer "},
    ],
)
def test_no_path_answers_without_the_right_token(run: RunDir, v0: Manifest, headers: dict[str, str]) -> None:
    async def body() -> None:
        guarded = guard(run, serve_unproved=True)
        del guarded.client.headers["Authorization"]
        for path in ("/health", "/v1/completions", "/v1/models", "/libra/state", "/nowhere", "/"):
            for method in ("GET", "POST", "OPTIONS"):
                response = await guarded.client.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path)
                assert TOKEN not in response.text

    in_loop(body)


def test_two_authorization_headers_are_refused(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run, serve_unproved=True)
        twice = [("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {TOKEN}")]
        del guarded.client.headers["Authorization"]
        assert (await guarded.client.get("/health", headers=twice)).status_code == 401

    in_loop(body)


def test_websockets_are_closed(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        inner_called = []

        async def inner(*_: Any) -> None:
            inner_called.append(True)

        middleware = GuardMiddleware(inner, settings=settings_of(run))
        await middleware({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
        assert [message["type"] for message in sent] == ["websocket.close"]
        assert not inner_called

    in_loop(body)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_token_file_that_others_can_read_is_refused(run: RunDir, v0: Manifest, mode: int) -> None:
    run.token_file.chmod(mode)

    with pytest.raises(UnguardedTokenError, match="chmod 600"):
        GuardMiddleware(Starlette(), settings=settings_of(run))


def test_a_short_token_is_refused(run: RunDir, v0: Manifest) -> None:
    run.token_file.write_text("secret")

    with pytest.raises(UnguardedTokenError, match="6 characters"):
        GuardMiddleware(Starlette(), settings=settings_of(run))


# ---- orders that must not be carried out -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, status, kind",
    [
        ({"run_id": "another"}, 403, "wrong_run"),
        ({"attempt": 7}, 403, "wrong_run"),
        ({"path": "../outside"}, 403, "outside_weights"),
        ({"path": "/etc"}, 403, "outside_weights"),
        ({"path": "weights"}, 403, "outside_weights"),
        ({"path": "weights/v000000/../v000001"}, 403, "outside_weights"),
        ({"path": "checkpoints"}, 403, "outside_weights"),
        ({"digest": "0" * 32}, 422, "unfit_weights"),
        ({"version": -1}, 400, "bad_request"),
        ({"version": "0"}, 400, "bad_request"),
        ({"version": True}, 400, "bad_request"),
        ({"method": "pickle"}, 400, "bad_request"),
        ({"deadline_s": 0}, 400, "bad_request"),
        ({"extra": 1}, 400, "bad_request"),
    ],
)
def test_a_wrong_order_is_refused_before_the_engine_hears_of_it(
    run: RunDir, v0: Manifest, changes: dict[str, Any], status: int, kind: str
) -> None:
    async def body() -> None:
        guarded = guard(run)
        for what in ("prepare", "commit", "prove"):
            response = await guarded.give(what, guarded.order(v0, **changes))
            if what == "prepare" or kind != "unfit_weights":
                assert (response.status_code, response.json()["kind"]) == (status, kind)
            assert response.status_code >= 400
        assert guarded.engine.log == []

    in_loop(body)


def test_a_version_folder_that_is_a_symbolic_link_out_of_the_run_is_refused(
    run: RunDir, v0: Manifest, tmp_path: Path
) -> None:
    async def body() -> None:
        guarded = guard(run)
        manifest = publish_full(run, 1)
        run.weights_version(1).rename(tmp_path / "elsewhere")
        run.weights_version(1).symlink_to(tmp_path / "elsewhere")
        response = await guarded.give("prepare", guarded.order(manifest))
        assert (response.status_code, response.json()["kind"]) == (403, "outside_weights")
        assert guarded.engine.log == []

    in_loop(body)


def test_an_oversized_order_is_refused_unread(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        announced = await guarded.client.post("/libra/prepare", content=b" " * (MAX_ORDER_BYTES + 1))
        assert (announced.status_code, announced.json()["kind"]) == (413, "too_large")

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 4096

        chunked = await guarded.client.post("/libra/prepare", content=endless())
        assert chunked.status_code == 413

    in_loop(body)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\x80", b"nonsense"])
def test_a_malformed_order_is_refused(run: RunDir, v0: Manifest, content: bytes) -> None:
    async def body() -> None:
        response = await guard(run).client.post("/libra/commit", content=content)
        assert (response.status_code, response.json()["kind"]) == (400, "bad_request")

    in_loop(body)


def test_the_first_version_may_be_the_one_started_from_and_later_ones_must_be_newer(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        assert (await guarded.refresh(v0)).status_code == 200
        v3 = publish_full(run, 3)
        assert (await guarded.refresh(v3)).status_code == 200
        for old in (v0, v3, publish_full(run, 2)):
            response = await guarded.give("prepare", guarded.order(old))
            assert (response.status_code, response.json()["kind"]) == (409, "version_not_newer")
        assert guarded.reloads.state()["version"] == 3

    in_loop(body)


def test_a_manifest_of_other_shapes_is_refused_by_the_tensor_s_name(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        tensors = small_tensors(1)
        tensors["model.layer.up"] = tensors["model.layer.up"][:, :2].contiguous()
        response = await guarded.give("prepare", guarded.order(publish_full(run, 1, tensors)))
        assert (response.status_code, response.json()["tensor"]) == (422, "model.layer.up")
        assert guarded.engine.log == []

    in_loop(body)


def test_a_version_of_another_architecture_is_refused(run: RunDir, v0: Manifest, tmp_path: Path) -> None:
    async def body() -> None:
        guarded = guard(run)
        other = tmp_path / "other"
        other.mkdir()
        (other / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8}))
        response = await guarded.give("prepare", guarded.order(publish_full(run, 1, source=other)))
        assert response.status_code == 422
        assert "config.json" in response.json()["error"]

    in_loop(body)


def test_a_commit_of_what_was_not_prepared_is_refused(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        v1 = publish_full(run, 1)
        await guarded.give("prepare", guarded.order(v0))
        response = await guarded.give("commit", guarded.order(v1))
        assert (response.status_code, response.json()["kind"]) == (409, "not_prepared")
        assert "pause" not in guarded.engine.log

    in_loop(body)


def test_a_second_reload_during_the_first_is_refused(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        guarded.engine.reading = asyncio.Event()
        first = asyncio.create_task(guarded.give("prepare", guarded.order(v0)))
        while "libra_prepared" not in guarded.engine.log:
            await asyncio.sleep(0)
        for what in ("prepare", "commit", "prove"):
            response = await guarded.give(what, guarded.order(v0))
            assert (response.status_code, response.json()["kind"]) == (409, "busy")
        guarded.engine.reading.set()
        assert (await first).status_code == 200

    in_loop(body)


# ---- what is served when ---------------------------------------------------------------------------------------------


def test_nothing_is_generated_before_the_first_proof(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        assert (await guarded.generate()).status_code == 503
        assert (await guarded.client.post("/v1/chat/completions")).status_code == 503
        assert (await guarded.client.get("/health")).status_code == 200
        assert (await guarded.refresh(v0)).status_code == 200
        assert (await guarded.generate()).status_code == 200

    in_loop(body)


def test_a_refresh_pauses_swaps_resets_queues_the_proof_and_only_then_resumes(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        await guarded.give("prepare", guarded.order(v0))
        await asyncio.sleep(0)
        guarded.engine.log.clear()
        response = await guarded.give("commit", guarded.order(v0))
        assert guarded.engine.log == ["pause", "libra_swap", "reset_caches", "probe", "canary", "resume"]
        answer = response.json()
        assert answer["proof"] == {"max_difference": 0.0, "tolerance": 1e-3, "tokens": len(PROBE.logprobs)}
        assert answer["prefix_cache_checked"] is True
        assert answer["paused_s"] >= answer["swap_s"] + answer["pause_s"]

    in_loop(body)


def test_answers_wait_until_the_new_version_is_proved(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run, serve_unproved=True)
        guarded.engine.proving = asyncio.Event()
        await guarded.give("prepare", guarded.order(v0))
        commit = asyncio.create_task(guarded.give("commit", guarded.order(v0)))
        while "resume" not in guarded.engine.log:
            await asyncio.sleep(0)
        held = [
            asyncio.create_task(guarded.generate()),
            asyncio.create_task(guarded.client.post("/v1/chat/completions")),
        ]
        done, _ = await asyncio.wait(held, timeout=0.1)
        assert not done
        guarded.engine.proving.set()
        assert [(await answer).status_code for answer in (commit, *held)] == [200, 200, 200]

    in_loop(body)


@pytest.mark.parametrize(
    "fault, kind",
    [
        ({"logprobs": [PROBE.logprobs[0], PROBE.logprobs[1] + 0.42]}, "proof_failed"),
        ({"logprobs": [float("nan"), PROBE.logprobs[1]]}, "proof_failed"),
        ({"logprobs": [PROBE.logprobs[0]]}, "proof_failed"),
        ({"cached_tokens": 128}, "proof_failed"),
        ({"swap_error": "half way"}, "swap_failed"),
    ],
)
def test_weights_that_are_not_proved_are_never_served(
    run: RunDir, v0: Manifest, fault: dict[str, Any], kind: str
) -> None:
    async def body() -> None:
        guarded = guard(run)
        assert (await guarded.refresh(v0)).status_code == 200
        for name, value in fault.items():
            setattr(guarded.engine, name, value)
        guarded.engine.proving = asyncio.Event()
        guarded.engine.log.clear()
        await guarded.give("prepare", guarded.order(v1 := publish_full(run, 1)))
        commit = asyncio.create_task(guarded.give("commit", guarded.order(v1)))
        while not commit.done() and "resume" not in guarded.engine.log:
            await asyncio.sleep(0)
        held = asyncio.create_task(guarded.generate())
        await asyncio.sleep(0.05)  # time enough for a wrong answer to come out
        guarded.engine.proving.set()
        response = await commit
        assert (response.status_code, response.json()["kind"]) == (500, kind)
        assert [(await held).status_code, (await guarded.generate()).status_code] == [503, 503]
        assert guarded.reloads.state()["version"] == 0

    in_loop(body)


def test_a_later_version_that_proves_itself_is_served_after_a_failed_proof(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        await guarded.refresh(v0)
        guarded.engine.logprobs = [0.0, 0.0]
        assert (await guarded.refresh(publish_full(run, 1))).status_code == 500
        guarded.engine.logprobs = list(PROBE.logprobs)
        assert (await guarded.refresh(publish_full(run, 2))).status_code == 200
        assert (await guarded.generate()).headers["x-libra-version"] == "2"

    in_loop(body)


def test_damaged_weights_are_refused_by_the_tensor_s_name_and_the_old_version_is_served_on(
    run: RunDir, v0: Manifest
) -> None:
    async def body() -> None:
        guarded = guard(run)
        await guarded.refresh(v0)
        guarded.engine.read_error = ("tensor model.embed is damaged", "model.embed")
        response = await guarded.give("prepare", guarded.order(v1 := publish_full(run, 1)))
        assert (response.status_code, response.json()["tensor"], response.json()["version"]) == (422, "model.embed", 0)
        assert (await guarded.give("commit", guarded.order(v1))).json()["kind"] == "not_prepared"
        assert (await guarded.generate()).headers["x-libra-version"] == "0"

    in_loop(body)


def test_the_restart_method_verifies_the_files_without_reading_them_into_the_engine(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        v1 = publish_full(run, 1)
        assert (await guarded.give("prepare", guarded.order(v1, method="restart"))).status_code == 200
        path = run.weights_version(1) / v1.tensors["model.layer.up"].file
        data = bytearray(path.read_bytes())
        data[v1.tensors["model.layer.up"].offset] ^= 1
        path.write_bytes(data)
        response = await guarded.give("prepare", guarded.order(v1, method="restart"))
        assert (response.status_code, response.json()["tensor"]) == (422, "model.layer.up")
        assert "libra_prepare" not in guarded.engine.log

    in_loop(body)


def test_a_server_started_from_a_version_serves_it_once_it_is_proved(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run, start_version=0)
        response = await guarded.give("prove", guarded.order(v0, method="restart"))
        assert response.json()["proof"]["tokens"] == len(PROBE.logprobs)
        assert (await guarded.generate()).status_code == 200
        assert (await guarded.give("prove", guarded.order(v0))).status_code == 409

    in_loop(body)


def test_a_server_started_from_a_version_that_it_cannot_prove_serves_nothing(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run, start_version=0)
        guarded.engine.logprobs = [-9.0, -9.0]
        assert (await guarded.give("prove", guarded.order(v0))).status_code == 500
        assert (await guarded.generate()).status_code == 503

    in_loop(body)


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_a_completion_says_which_version_generated_its_tokens(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        await guarded.refresh(v0)
        guarded.segment_log.found = [[[0, 1], [1, 1]]]
        response = await guarded.generate()
        assert response.json()["choices"][0]["version_segments"] == [[0, 1], [1, 1]]
        assert response.headers["x-libra-version"] == "0"
        assert response.headers["content-length"] == str(len(response.content))
        assert guarded.segment_log.followed == [f"cmpl-{response.json()['id']}"]

    in_loop(body)


def test_a_client_s_own_request_id_cannot_collide_with_another_request(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run, serve_unproved=True)
        ids = set()
        for _ in range(3):
            response = await guarded.client.post("/v1/completions", json=GENERATION, headers={"X-Request-Id": "mine"})
            ids.add(response.json()["id"])
        assert len(ids) == 3
        assert "mine" not in ids

    in_loop(body)


def test_a_stream_passes_in_pieces(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run, serve_unproved=True)
        response = await guarded.client.post("/v1/completions", json={**GENERATION, "stream": True})
        assert response.text == "onetwo"

    in_loop(body)


def test_a_stream_under_way_breaks_off_when_the_new_weights_are_not_proved(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run, serve_unproved=True)
        guarded.app.state.between.clear()
        stream = asyncio.create_task(guarded.client.post("/v1/completions", json={**GENERATION, "stream": True}))
        while not guarded.segment_log.followed:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        guarded.engine.logprobs = [0.0, 0.0]
        assert (await guarded.refresh(v0)).status_code == 500
        guarded.app.state.between.set()
        with pytest.raises(ConnectionAbortedError):
            await stream

    in_loop(body)


def test_segments_that_do_not_fit_the_choices_are_an_error_not_a_guess() -> None:
    with pytest.raises(ValueError, match="2 choices"):
        with_segments(b'{"choices": [{}, {}]}', [[[0, 1]]])
