"""An instance repeats what it is asked again, and ends when it can take nothing any more; the server is a stand-in for vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.context import StageContext
from stages.desired import DesiredState, StepSpec, write_desired
from stages.files import read_json
from stages.rollout.errors import RefusedAgainError
from stages.rollout.follow import longest_pause_s
from stages.rollout.node_folder import node_lock
from stages.rollout.server_process import ServerProcess
from stages.rollout.stage import run
from stages.weights import filesystems
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

REFUSAL = [422, {"error": "tensor a.b is damaged", "kind": "unfit_weights", "tensor": "a.b", "version": 2}]
TMPFS, NFS = 0x0102_1994, 0x6969


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServerProcess]]:
    with fake_servers(monkeypatch) as started:
        yield started


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    return make_context(tmp_path)


def orders(context: StageContext, what: str) -> int:
    """How often the server was given this order."""
    return (context.run.logs / f"{NAME}.server.log").read_text().count(f"order {what} ")


def with_retry(context: StageContext, version: int, phase: str, retry: int) -> dict[str, Any]:
    path = context.run.ack_json(version, NAME, phase)

    def look() -> dict[str, Any] | None:
        record = read_json(path)
        return record if record is not None and record["retry"] == retry else None

    found: dict[str, Any] = awaited(f"{phase} with retry {retry}", look)
    return found


def test_one_that_refused_tries_again_when_it_is_asked_again(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PREPARE", json.dumps(REFUSAL))

    def refresh() -> None:
        request(context, 3)
        with_retry(context, 3, "nack", 0)
        request(context, 3, retries={NAME: 1})
        with_retry(context, 3, "nack", 1)

    live_until(context, refresh)

    assert orders(context, "prepare") == 2


def test_a_request_that_is_written_anew_for_others_changes_nothing(context: StageContext) -> None:
    def refresh() -> None:
        request(context, 3)
        ack(context, 3, "loaded")
        request(context, 3, instances=(NAME, "rollout_001"), retries={"rollout_001": 1})
        request(context, 4)
        ack(context, 4, "loaded")

    live_until(context, refresh)

    assert orders(context, "commit") == 2


def test_one_that_has_proved_the_version_only_repeats_its_answers(context: StageContext) -> None:
    def refresh() -> None:
        request(context, 3)
        ack(context, 3, "loaded")
        context.run.ack_json(3, NAME, "loaded").unlink()  # say that it was lost
        request(context, 3, retries={NAME: 1})
        ack(context, 3, "loaded")

    live_until(context, refresh)

    assert orders(context, "commit") == 1


def replaced_when_it_fails(context: StageContext) -> None:
    step = StepSpec(NAME, "rollout", 0, 0, 1, 1, 1, 1, 0, restart="replace", max_restarts=3)
    write_desired(replace(context.run, writer="launcher"), DesiredState("run", (step,)))


def test_two_versions_refused_one_after_another_end_an_instance_that_is_replaced_then(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced_when_it_fails(context)
    monkeypatch.setenv("FAKE_PREPARE", json.dumps(REFUSAL))

    def refresh() -> None:
        for version in (3, 4):
            request(context, version)
            ack(context, version, "nack")

    when_ready(context, refresh)
    with pytest.raises(RefusedAgainError, match="refused versions 3 and 4"):
        run(context)


def test_a_version_that_this_host_does_not_see_in_time_is_refused(context: StageContext) -> None:
    def refresh() -> None:
        request(context, 3)
        ack(context, 3, "loaded")
        request(context, 4, digest="0" * 32, deadline_s=0.2, is_visible=False)
        ack(context, 4, "nack")
        awaited("readiness", lambda: status(context)["state"] == "ready")

    live_until(context, refresh)

    nack = ack(context, 4, "nack")
    assert (nack["phase"], nack["serving_version"]) == ("prepare", 3)
    assert "v000004 with digest 00000000000000000000000000000000 from the trainer" in nack["error"]


def test_a_version_is_not_waited_for_when_a_newer_one_is_asked_for(context: StageContext) -> None:
    def refresh() -> None:
        request(context, 3, is_visible=False)
        request(context, 4)
        ack(context, 4, "loaded")

    live_until(context, refresh)

    assert read_json(context.run.ack_json(3, NAME, "nack")) is None


def test_one_whose_turn_on_the_node_does_not_come_refuses_and_goes_on(context: StageContext) -> None:
    def refresh() -> None:
        with node_lock(context.run.run_id, deadline_s=5.0, check=lambda: None):  # another instance hangs
            request(context, 2, strategy="serial", deadline_s=0.2)
            ack(context, 2, "nack")
        request(context, 3, strategy="serial")
        ack(context, 3, "loaded")

    live_until(context, refresh)

    nack = ack(context, 2, "nack")
    assert nack["phase"] == "commit"
    assert "the node's reload lock" in nack["error"]


@pytest.mark.parametrize(
    ("magic", "num_instances", "pause_s"), [(TMPFS, 1, 0.01), (NFS, 1, 0.05), (TMPFS, 20, 0.02), (NFS, 512, 0.512)]
)
def test_a_file_server_is_asked_less_often_than_this_host_and_less_by_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: int, num_instances: int, pause_s: float
) -> None:
    monkeypatch.setattr(filesystems, "filesystem_magic", lambda _: magic)

    assert longest_pause_s(tmp_path, num_instances) == pytest.approx(pause_s)
