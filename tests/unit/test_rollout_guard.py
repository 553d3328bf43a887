"""Attempts to get past the guard: without the token, and with orders that must not be carried out."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from stages.rollout.errors import UnguardedTokenError
from stages.rollout.guard import MAX_ORDER_BYTES, GuardMiddleware
from stages.rundir import RunDir
from stages.weights.manifest import Manifest
from tests.rollout_guard_kit import TOKEN, guard, in_loop, run_with_token, settings_of
from tests.weights_kit import publish_full, small_tensors


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_with_token(tmp_path / "run")


@pytest.fixture
def v0(run: RunDir) -> Manifest:
    return publish_full(run, 0)


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


def test_of_the_folder_that_the_engine_was_started_from_nothing_is_needed_later(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        assert (await guarded.refresh(v0)).status_code == 200
        shutil.rmtree(run.weights_version(0))
        assert (await guarded.refresh(publish_full(run, 3))).status_code == 200

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
