"""Attempts over a real socket, with bytes that no HTTP library sends: nothing answers without the token."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from tests.rollout_guard_kit import TOKEN, Guarded, guard, run_with_token
from tests.weights_kit import publish_full

WITH_TOKEN = f"Authorization: Bearer {TOKEN}\r\n"


class Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        """None: it runs in a thread."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Guarded:
    run = run_with_token(tmp_path_factory.mktemp("wire") / "run")
    publish_full(run, 0)
    return guard(run, serve_unproved=True)


@pytest.fixture(scope="module")
def port(guarded: Guarded) -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(guarded.app, log_level="critical", lifespan="off", timeout_keep_alive=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def exchange(port: int, request: str, *, half_close: bool = True) -> list[int]:
    """The statuses of all answers to these bytes, which are sent as they are; then the connection is closed for sending."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request.encode("latin-1"))
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def test_with_the_token_the_same_way_leads_in(port: int) -> None:
    assert exchange(port, f"GET /libra/state HTTP/1.1\r\nHost: x\r\n{WITH_TOKEN}\r\n") == [200]


@pytest.mark.parametrize(
    "target",
    [
        "/libra/state",
        "//libra/state",
        "/./libra/state",
        "/health/../libra/state",
        "/health/%2e%2e/libra/state",
        "/%6cibra/state",
        "/libra/state?token=" + TOKEN,
        "/libra/state?authorization=Bearer%20" + TOKEN,
        "/libra/state#" + TOKEN,
        "http://127.0.0.1/libra/state",
        "http://user:" + TOKEN + "@127.0.0.1/libra/state",
        "/LIBRA/state",
        "/libra/state%00",
        "/libra/state;x",
        "*",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "TRACE", "CONNECT", "PRI"])
def test_no_spelling_of_a_path_leads_around_the_token(port: int, method: str, target: str) -> None:
    statuses = exchange(port, f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    assert set(statuses) <= {400, 401}


@pytest.mark.parametrize(
    "headers",
    [
        f"Proxy-Authorization: Bearer {TOKEN}\r\n",
        f"Cookie: Authorization=Bearer {TOKEN}\r\n",
        f"X-Forwarded-Authorization: Bearer {TOKEN}\r\n",
        f"X-Api-Key: {TOKEN}\r\n",
        "X-Forwarded-For: 127.0.0.1\r\nX-Real-Ip: 127.0.0.1\r\n",
        f"Authorization: Bearer {TOKEN[:-1]}\r\n",
        f"Authorization: Bearer {TOKEN}{TOKEN}\r\n",
        f"Authorization: Bearer {TOKEN.upper()}\r\n",
        f"Authorization: Bearer {TOKEN}, Bearer x\r\n",
        f"Authorization: Bearer\r\n {TOKEN}\r\n",
        f"Authorization: Bearer x\r\n{WITH_TOKEN}",
        f"{WITH_TOKEN}Authorization: Bearer x\r\n",
        "Authorization: Bearer " + "a" * 60_000 + "\r\n",
    ],
    ids=lambda text: text[:40],
)
def test_no_other_header_stands_for_the_token(port: int, headers: str) -> None:
    statuses = exchange(port, f"GET /libra/state HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n")

    assert set(statuses) <= {400, 401, 431}


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        "Content-Length: 4\r\nContent-Length: 60\r\n",
        "Transfer-Encoding: x, chunked\r\n",
    ],
)
def test_a_request_hidden_in_the_body_of_another_needs_its_own_token(port: int, framing: str) -> None:
    hidden = "GET /libra/state HTTP/1.1\r\nHost: x\r\n\r\n"

    statuses = exchange(port, f"POST /libra/prepare HTTP/1.1\r\nHost: x\r\n{framing}\r\n0\r\n\r\n{hidden}")

    assert 200 not in statuses


def test_a_token_counts_for_its_own_request_only(port: int) -> None:
    first = f"GET /libra/state HTTP/1.1\r\nHost: x\r\n{WITH_TOKEN}\r\n"
    second = "GET /libra/state HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    assert exchange(port, first + second, half_close=False) == [200, 401]


def test_a_body_without_end_is_cut_off_at_the_limit(port: int) -> None:
    chunk = f"{4096:x}\r\n{' ' * 4096}\r\n"
    request = f"POST /libra/prepare HTTP/1.1\r\nHost: x\r\n{WITH_TOKEN}Transfer-Encoding: chunked\r\n\r\n{chunk * 40}"

    assert exchange(port, request)[0] in (400, 413)


def test_an_upgrade_to_a_websocket_is_refused(port: int) -> None:
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"

    statuses = exchange(port, f"GET /v1/realtime HTTP/1.1\r\nHost: x\r\n{upgrade}{WITH_TOKEN}\r\n")

    assert 101 not in statuses


def test_the_server_still_serves_after_all_that(port: int, guarded: Guarded, tmp_path: Path) -> None:
    assert exchange(port, f"GET /libra/state HTTP/1.1\r\nHost: x\r\n{WITH_TOKEN}\r\n") == [200]
    assert guarded.engine.log == []
