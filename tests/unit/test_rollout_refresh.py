"""What the agent does with weight requests and what it acknowledges; the server is a small stand-in for vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.context import StageContext, StoppedError
from stages.files import read_json
from stages.rollout.errors import (
    ServerDiedError,
    UnprovedWeightsError,
)
from stages.rollout.node_folder import node_lock
from stages.rollout.server_process import ServerProcess
from stages.rollout.stage import run, run_alone
from tests.delta_kit import publish_chain
from tests.rollout_agent_kit import (
    NAME,
    ack,
    awaited,
    fake_servers,
    live_until,
    make_context,
    request,
    status,
    when_ready,
)
from tests.weights_kit import publish_full


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServerProcess]]:
    with fake_servers(monkeypatch) as started:
        yield started


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    return make_context(tmp_path)


# ---- requests --------------------------------------------------------------------------------------------------------


def test_a_request_is_prepared_committed_and_acknowledged(context: StageContext) -> None:
    found: dict[str, dict[str, Any]] = {}

    def refresh() -> None:
        request(context, 0)
        found.update({phase: ack(context, 0, phase) for phase in ("prepared", "loaded")})
        found["status"] = status(context)

    live_until(context, refresh)

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


@pytest.mark.exercises("rollout_weight_reload_method")
def test_the_restart_method_replaces_the_process_and_the_registered_address(
    context: StageContext, servers: list[ServerProcess]
) -> None:
    found: dict[str, dict[str, Any]] = {}

    def refresh() -> None:
        found["before"] = status(context)
        request(context, 4, method="restart", strategy="serial")
        found["loaded"] = ack(context, 4, "loaded")
        found["after"] = status(context)

    live_until(context, refresh)

    log = (context.run.logs / f"{NAME}.server.log").read_text()
    assert f"starts from {context.run.weights_version(4)}" in log
    assert found["before"]["server_pid"] != found["after"]["server_pid"]
    assert found["before"]["base_url"] != found["after"]["base_url"]
    assert found["after"]["leases"] == [4]
    assert found["loaded"]["process_stop_s"] > 0
    assert found["loaded"]["model_load_s"] > 0
    assert found["loaded"]["total_reload_s"] >= found["loaded"]["paused_s"]


@pytest.mark.exercises("rollout_weight_reload_strategy")
@pytest.mark.parametrize(("strategy", "waits"), [("serial", True), ("parallel", False)])
def test_only_the_serial_strategy_waits_for_its_turn_on_the_node(
    context: StageContext, strategy: str, waits: bool
) -> None:
    found: dict[str, Any] = {}

    def refresh() -> None:
        with node_lock(context.run.run_id, deadline_s=5.0, check=lambda: None):  # another instance reloads
            request(context, 2, strategy=strategy)
            ack(context, 2, "prepared")
            if not waits:
                ack(context, 2, "loaded")
            found["early"] = read_json(context.run.ack_json(2, NAME, "loaded"))
        found["loaded"] = ack(context, 2, "loaded")

    live_until(context, refresh)

    assert (found["early"] is None) is waits
    assert (found["loaded"]["lock_wait_s"] > 0.0) is waits


def test_a_version_is_leased_before_it_is_read(context: StageContext) -> None:
    def refresh() -> None:
        request(context, 3)
        ack(context, 3, "loaded")

    live_until(context, refresh)

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

    live_until(context, refresh)

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

    live_until(context, refresh)

    assert read_json(context.run.ack_json(1, NAME, "loaded")) is None


# ---- alone -----------------------------------------------------------------------------------------------------------


def test_alone_it_serves_and_proves_the_newest_published_version(context: StageContext) -> None:
    publish_full(replace(context.run, writer="trainer"), 7)
    found: list[dict[str, Any]] = []

    def look() -> None:
        found.append(status(context))

    live_until(context, look, run_alone)

    log = (context.run.logs / f"{NAME}.server.log").read_text()
    assert f"starts from {context.run.weights_version(7)}" in log
    assert '"version": 7' in log
    assert (found[0]["version"], found[0]["leases"]) == (7, [7])


def test_alone_it_starts_from_whole_files_and_loads_a_delta_in_place(context: StageContext) -> None:
    manifests, _ = publish_chain(replace(context.run, writer="trainer"), 3)
    found: list[dict[str, Any]] = []

    live_until(context, lambda: found.append(status(context)), run_alone)

    log = (context.run.logs / f"{NAME}.server.log").read_text()
    assert f"starts from {context.run.weights_version(0)}" in log
    assert found[0]["manifest_digest"] == manifests[2].digest
    assert (found[0]["version"], found[0]["leases"]) == (2, [2])


@pytest.mark.exercises("model_path")
def test_alone_in_a_run_without_weights_it_serves_model_path(context: StageContext) -> None:
    when_ready(context, context.stop.set)

    with pytest.raises(StoppedError):
        run_alone(context)

    assert f"starts from {context.config.model_path}" in (context.run.logs / f"{NAME}.server.log").read_text()
