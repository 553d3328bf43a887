"""The agent against a small stand-in for the vLLM server: starts, deaths, stops, and what it acknowledges."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.schema import LibraConfig
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.context import StageContext, StoppedError
from stages.files import read_json, wait_for
from stages.rollout import server_process
from stages.rollout.command import ServerCommand, server_command
from stages.rollout.errors import (
    GuardOpenError,
    RolloutOptionError,
    ServerDiedError,
    UnprovedWeightsError,
    VllmStartError,
)
from stages.rollout.orphans import marked_pids
from stages.rollout.server_process import ServerProcess
from stages.rollout.settings import SERVER_ID_VARIABLE
from stages.rollout.stage import run, run_alone
from stages.rundir import FencedError, RunDir
from stages.weights.records import RefreshRequest
from traces.recorder import Recorder

NAME = "rollout_000"

pool = ThreadPoolExecutor(4)
beside: list[Future[None]] = []


@pytest.fixture(autouse=True)
def fake_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServerProcess]]:
    """Every server started in a test is the stand-in; whatever is left of it afterwards is a failure."""
    beside.clear()
    started: list[ServerProcess] = []

    def fake_command(*args: Any, **kwargs: Any) -> ServerCommand:
        command = server_command(*args, **kwargs)
        return ServerCommand([*command.arguments[:2], "tests.fake_rollout_server"], command.environment)

    start = ServerProcess.start

    def remembered(*args: Any, **kwargs: Any) -> ServerProcess:
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(server_process, "server_command", fake_command)
    monkeypatch.setattr(ServerProcess, "start", remembered)
    yield started
    for future in beside:
        future.result(20)
    left = {server.server_id: marked_pids(server.server_id) for server in started}
    assert not any(left.values()), f"left behind: {left}"
    assert not any(server.scratch.exists() for server in started)


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    made = RunDir.create(tmp_path / "run")
    made.token_file.touch(mode=0o600)
    made.token_file.write_text("t" * 40)
    config = LibraConfig(model_path=str(model))
    config.hardware.device = "cpu"
    config.rollout.kv_cache_bytes = 1e6
    config.rollout.ready_timeout_s = 20.0
    config.rollout.stop_timeout_s = 0.3
    config.rollout.heartbeat_interval_s = 0.05
    placements = (InstancePlacement(NAME, 1, 0, 0),)
    layout = TrainLayout(1, 1, 1, 1, 1, 1, 1, 1)
    plan = Plan("single", "test", "cpu", layout, RolloutLayout(1, 1, 1, placements))
    run_dir = replace(made, writer=NAME)
    recorder = Recorder(made.traces, "rollout", 0, 1, NAME, enabled=False)
    return StageContext(run_dir, config, plan, "rollout", NAME, 0, 1, 0, recorder)


def status(context: StageContext) -> dict[str, Any]:
    return context.run.read(context.run.instance_json(NAME)) or {"state": "none"}


def awaited(what: str, look: Callable[[], Any]) -> Any:
    return wait_for(lambda: look() or None, deadline_s=20, awaited=what, from_whom="the agent")


def meanwhile(context: StageContext, body: Callable[[], None]) -> None:
    """Run `body` beside the agent, which needs the main thread; if `body` fails the agent is stopped, and the test fails."""

    def guarded() -> None:
        is_done = False
        try:
            body()
            is_done = True
        finally:
            if not is_done:
                context.stop.set()

    beside.append(pool.submit(guarded))


def when_ready(context: StageContext, body: Callable[[], None]) -> None:
    def later() -> None:
        awaited("readiness", lambda: status(context)["state"] == "ready")
        body()

    meanwhile(context, later)


def request(context: StageContext, version: int, **changes: Any) -> None:
    wanted = RefreshRequest(
        version=version,
        path=f"weights/v{version:06d}",
        digest=f"{version:032x}",
        method="inplace",
        strategy="parallel",
        instances=(NAME,),
        deadline_s=10.0,
        time=time.time(),
    )
    record = replace(wanted, **changes).to_record()
    replace(context.run, writer="trainer").write(context.run.request_json(version), record)


def ack(context: StageContext, version: int, phase: str) -> dict[str, Any]:
    path = context.run.ack_json(version, NAME, phase)
    found: dict[str, Any] = awaited(f"{phase} of version {version}", lambda: read_json(path))
    return found


# ---- starting --------------------------------------------------------------------------------------------------------


def test_an_instance_registers_beats_and_stops_when_asked(context: StageContext) -> None:
    seen: list[dict[str, Any]] = []

    def watch() -> None:
        seen.append(status(context))
        awaited("a heartbeat", lambda: status(context)["heartbeat"] > seen[0]["heartbeat"] + 2)
        context.stop.set()

    when_ready(context, watch)
    with pytest.raises(StoppedError):
        run(context)

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
    context: StageContext, fake_server: list[ServerProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_START", "address")
    monkeypatch.setenv("FAKE_MARK", str(tmp_path / "mark"))
    when_ready(context, context.stop.set)

    with pytest.raises(StoppedError):
        run(context)

    assert len(fake_server) == 2
    assert fake_server[0].base_url != fake_server[1].base_url


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
    context: StageContext, fake_server: list[ServerProcess]
) -> None:
    context.config.model_path = str(context.run.root)

    with pytest.raises(RolloutOptionError, match="model_path"):
        run(context)

    assert not fake_server


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
    context: StageContext, fake_server: list[ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CHILD", "1")

    def kill() -> None:
        server = fake_server[0]
        (child,) = set(marked_pids(server.server_id)) - {server.pid}
        os.kill(child, signal.SIGKILL)

    when_ready(context, kill)
    with pytest.raises(ServerDiedError, match="a process of the vLLM server ended"):
        run(context)


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


# ---- requests --------------------------------------------------------------------------------------------------------


def test_a_request_is_prepared_committed_and_acknowledged(context: StageContext) -> None:
    found: dict[str, dict[str, Any]] = {}

    def refresh() -> None:
        request(context, 0)
        found.update({phase: ack(context, 0, phase) for phase in ("prepared", "loaded")})
        found["status"] = status(context)
        context.stop.set()

    when_ready(context, refresh)
    with pytest.raises(StoppedError):
        run(context)

    loaded = found["loaded"]
    assert found["prepared"]["bytes"] == 123
    assert (loaded["version"], loaded["digest"], loaded["method"], loaded["strategy"]) == (
        0, "0" * 32, "inplace", "parallel",
    )  # fmt: skip
    assert (loaded["paused_s"], loaded["model_load_s"], loaded["prepare_s"]) == (0.002, 0.001, 0.001)
    assert (loaded["lock_wait_s"], loaded["process_stop_s"]) == (0.0, 0.0)
    assert loaded["proof"]["tokens"] == 2
    assert loaded["writer"] == NAME
    assert (found["status"]["version"], found["status"]["manifest_digest"]) == (0, "0" * 32)


def test_the_restart_method_replaces_the_process_and_the_registered_address(
    context: StageContext, fake_server: list[ServerProcess]
) -> None:
    found: dict[str, dict[str, Any]] = {}

    def refresh() -> None:
        found["before"] = status(context)
        request(context, 4, method="restart", strategy="serial")
        found["loaded"] = ack(context, 4, "loaded")
        found["after"] = status(context)
        context.stop.set()

    when_ready(context, refresh)
    with pytest.raises(StoppedError):
        run(context)

    log = (context.run.logs / f"{NAME}.server.log").read_text()
    assert f"starts from {context.run.weights_version(4)}" in log
    assert found["before"]["server_pid"] != found["after"]["server_pid"]
    assert found["before"]["base_url"] != found["after"]["base_url"]
    assert found["after"]["leases"] == [4]
    assert found["loaded"]["process_stop_s"] > 0
    assert found["loaded"]["model_load_s"] > 0
    assert found["loaded"]["total_reload_s"] >= found["loaded"]["paused_s"]


def test_a_version_is_leased_before_it_is_read(context: StageContext) -> None:
    def refresh() -> None:
        request(context, 3)
        ack(context, 3, "loaded")
        context.stop.set()

    when_ready(context, refresh)
    with pytest.raises(StoppedError):
        run(context)

    assert "leases at prepare [3]" in (context.run.logs / f"{NAME}.server.log").read_text()
    assert status(context)["leases"] == []


def test_a_refused_preparation_is_a_nack_and_the_instance_goes_on(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = [422, {"error": "tensor a.b is damaged", "kind": "unfit_weights", "tensor": "a.b", "version": 2}]
    monkeypatch.setenv("FAKE_PREPARE", json.dumps(refusal))
    found: dict[str, dict[str, Any]] = {}

    def refresh() -> None:
        request(context, 3)
        found["nack"] = ack(context, 3, "nack")
        awaited("readiness", lambda: status(context)["state"] == "ready")
        found["status"] = status(context)
        context.stop.set()

    when_ready(context, refresh)
    with pytest.raises(StoppedError):
        run(context)

    nack = found["nack"]
    assert (nack["phase"], nack["tensor"], nack["serving_version"]) == ("prepare", "a.b", 2)
    assert found["status"]["leases"] == []


def test_weights_that_cannot_be_proved_end_the_instance(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = [500, {"error": "differs by 0.42", "kind": "proof_failed", "tensor": "", "version": 0}]
    monkeypatch.setenv("FAKE_COMMIT", json.dumps(refusal))
    when_ready(context, lambda: request(context, 1))

    with pytest.raises(UnprovedWeightsError, match=r"differs by 0\.42"):
        run(context)

    nack = ack(context, 1, "nack")
    assert (nack["phase"], nack["serving_version"]) == ("proof", -1)


def test_a_server_that_dies_during_a_reload_is_reported_as_dead(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_COMMIT", "die")
    when_ready(context, lambda: request(context, 1))

    with pytest.raises(ServerDiedError, match="SIGKILL"):
        run(context)


def test_a_request_for_other_instances_is_left_alone(context: StageContext) -> None:
    def refresh() -> None:
        request(context, 1, instances=("rollout_001",))
        request(context, 0)
        ack(context, 0, "loaded")
        context.stop.set()

    when_ready(context, refresh)
    with pytest.raises(StoppedError):
        run(context)

    assert read_json(context.run.ack_json(1, NAME, "loaded")) is None


# ---- alone -----------------------------------------------------------------------------------------------------------


def test_alone_it_serves_and_proves_the_newest_published_version(context: StageContext) -> None:
    trainer = replace(context.run, writer="trainer")
    trainer.write(context.run.latest_json, {"version": 7, "digest": "7" * 32, "path": "weights/v000007"})
    found: list[dict[str, Any]] = []

    def look() -> None:
        found.append(status(context))
        context.stop.set()

    when_ready(context, look)
    with pytest.raises(StoppedError):
        run_alone(context)

    log = (context.run.logs / f"{NAME}.server.log").read_text()
    assert f"starts from {context.run.weights_version(7)}" in log
    assert '"version": 7' in log
    assert (found[0]["version"], found[0]["leases"]) == (7, [7])


def test_alone_in_a_run_without_weights_it_serves_model_path(context: StageContext) -> None:
    when_ready(context, context.stop.set)

    with pytest.raises(StoppedError):
        run_alone(context)

    assert f"starts from {context.config.model_path}" in (context.run.logs / f"{NAME}.server.log").read_text()
