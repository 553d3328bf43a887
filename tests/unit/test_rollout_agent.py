"""How the agent starts, watches and ends its server; the server is a small stand-in for vLLM."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.steps import exception_text
from stages.context import StageContext, StoppedError
from stages.rollout import agent
from stages.rollout.errors import (
    GuardOpenError,
    RolloutOptionError,
    ServerDiedError,
    VllmStartError,
)
from stages.rollout.orphans import marked_pids
from stages.rollout.server_process import ServerProcess
from stages.rollout.settings import SERVER_ID_VARIABLE
from stages.rollout.stage import run
from stages.rundir import FencedError
from tests.rollout_agent_kit import (
    awaited,
    fake_servers,
    live_until,
    make_context,
    meanwhile,
    status,
    when_ready,
)


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServerProcess]]:
    with fake_servers(monkeypatch) as started:
        yield started


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    return make_context(tmp_path)


# ---- starting --------------------------------------------------------------------------------------------------------


def test_an_instance_registers_beats_and_stops_when_asked(context: StageContext) -> None:
    seen: list[dict[str, Any]] = []

    def watch() -> None:
        seen.append(status(context))
        awaited("a heartbeat", lambda: status(context)["heartbeat"] > seen[0]["heartbeat"] + 2)

    live_until(context, watch)

    assert seen[0]["base_url"].startswith("http://127.0.0.1:")
    assert (seen[0]["version"], seen[0]["manifest_digest"], seen[0]["agent_pid"]) == (-1, "", os.getpid())
    assert status(context)["state"] == "stopping"


def test_a_slow_start_is_waited_for(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_START", "slow")
    when_ready(context, context.stop.set)

    with pytest.raises(StoppedError):
        run(context)


def test_a_server_that_exits_at_the_start_is_reported_with_its_last_words(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_START", "exit")
    started_s = time.monotonic()

    with pytest.raises(VllmStartError, match=r"exited with code 1(.|\n)*made of cheese"):
        run(context)

    assert time.monotonic() - started_s < 10


def test_a_traceback_in_the_servers_log_is_not_taken_for_the_agents_own() -> None:
    log_tail = (
        'Traceback (most recent call last):\n  File "core.py", line 1, in start\nRuntimeError: see root cause above'
    )
    try:
        raise VllmStartError("it was killed by SIGKILL", log_tail, "server.log")
    except VllmStartError:
        text = traceback.format_exc()

    assert "VllmStartError: vLLM did not start: it was killed by SIGKILL" in exception_text(text.splitlines())


def test_the_reason_of_a_failed_start_is_not_hidden_by_what_libraries_print_at_exit(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_START", "noisy")

    with pytest.raises(VllmStartError, match="made of cheese") as caught:
        run(context)

    assert "nanobind" not in str(caught.value)


def test_a_server_that_never_answers_is_given_up_at_the_deadline(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_START", "never")
    context.config.rollout.ready_timeout_s = 1.0

    with pytest.raises(VllmStartError, match=r"rollout\.ready_timeout_s"):
        run(context)


def test_a_port_that_the_server_lost_to_somebody_else_is_replaced_by_another(
    context: StageContext, servers: list[ServerProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_START", "address")
    monkeypatch.setenv("FAKE_MARK", str(tmp_path / "mark"))
    when_ready(context, context.stop.set)

    with pytest.raises(StoppedError):
        run(context)

    assert len(servers) == 2
    assert servers[0].base_url != servers[1].base_url


def test_a_server_that_answers_without_a_token_is_not_put_into_service(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_START", "open")

    with pytest.raises(GuardOpenError, match="without token"):
        run(context)


def test_a_stop_during_the_start_is_obeyed_at_once(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_START", "never")
    stopping_s: list[float] = []

    def stop() -> None:
        awaited("a server", lambda: status(context).get("server_pid"))
        stopping_s.append(time.monotonic())
        context.stop.set()

    meanwhile(context, stop)
    with pytest.raises(StoppedError):
        run(context)

    assert time.monotonic() - stopping_s[0] < 3


def test_a_model_path_that_is_no_model_is_refused_before_anything_starts(
    context: StageContext, servers: list[ServerProcess]
) -> None:
    context.config.model_path = str(context.run.root)

    with pytest.raises(RolloutOptionError, match="model_path"):
        run(context)

    assert not servers


def test_an_instance_that_the_plan_does_not_have_is_refused(context: StageContext) -> None:
    context.name = "rollout_009"

    with pytest.raises(RolloutOptionError, match="rollout_000"):
        run(context)


# ---- ending ----------------------------------------------------------------------------------------------------------


def test_the_death_of_the_server_is_noticed_at_once_and_named(context: StageContext) -> None:
    killed_s: list[float] = []

    def kill() -> None:
        killed_s.append(time.monotonic())
        os.kill(status(context)["server_pid"], signal.SIGKILL)

    when_ready(context, kill)
    with pytest.raises(ServerDiedError, match=r"killed by SIGKILL(.|\n)*fake server"):
        run(context)

    assert time.monotonic() - killed_s[0] < 3


def test_the_death_of_a_process_behind_the_server_is_noticed_too(
    context: StageContext, servers: list[ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CHILD", "1")
    monkeypatch.setenv("FAKE_STOP", "stubborn")
    context.config.rollout.stop_timeout_s = 60.0
    killed: list[tuple[int, float]] = []

    def kill() -> None:
        server = servers[0]
        (child,) = set(marked_pids(server.server_id)) - {server.pid}
        killed.append((child, time.monotonic()))
        os.kill(child, signal.SIGKILL)

    when_ready(context, kill)
    with pytest.raises(ServerDiedError, match=r"sleep \(pid \d+\) of the vLLM server ended") as caught:
        run(context)

    assert f"(pid {killed[0][0]})" in str(caught.value)
    assert time.monotonic() - killed[0][1] < 10  # what is left of the server is not waited for


def test_a_server_that_ignores_term_and_its_stray_children_are_killed(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STOP", "stubborn")
    monkeypatch.setenv("FAKE_CHILD", "1")
    when_ready(context, context.stop.set)
    started_s = time.monotonic()

    with pytest.raises(StoppedError):
        run(context)

    assert time.monotonic() - started_s < 10


def test_an_agent_of_an_attempt_that_is_over_ends(context: StageContext) -> None:
    when_ready(context, lambda: context.run.start_attempt(1))

    with pytest.raises(FencedError):
        run(context)


def test_only_processes_with_the_server_s_mark_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert marked_pids("no-such-server") == []
    assert SERVER_ID_VARIABLE not in os.environ


def test_a_server_that_obeys_a_common_stop_before_its_agent_did_not_die(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_COMMON_STOP_S", 10.0)  # however busy the machine is

    def stop_both() -> None:
        os.kill(status(context)["server_pid"], signal.SIGTERM)
        awaited("the end of the server", lambda: not Path(f"/proc/{status(context)['server_pid']}/exe").exists())

    live_until(context, stop_both)
