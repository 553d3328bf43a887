"""What the guard lets out: nothing unproved, everything with its version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stages.rollout.guard import with_segments
from stages.rundir import RunDir
from stages.weights.manifest import Manifest
from tests.delta_kit import publish_chain
from tests.rollout_guard_kit import GENERATION, guard, in_loop, run_with_token
from tests.weights_kit import PROBE, publish_full, small_tensors


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_with_token(tmp_path / "run")


@pytest.fixture
def v0(run: RunDir) -> Manifest:
    return publish_full(run, 0)


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
        ({"swap_fault": "embed in the engine does not hold model.embed"}, "proof_failed"),
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


def test_the_restart_method_refuses_a_delta_which_has_no_whole_files(run: RunDir) -> None:
    delta = publish_chain(run, 2, small_tensors())[0][1]

    async def body() -> None:
        guarded = guard(run)
        response = await guarded.give("prepare", guarded.order(delta, method="restart"))
        assert response.status_code == 422
        assert "version 1 is published as a delta of version 0" in response.json()["error"]

    in_loop(body)


@pytest.mark.parametrize(
    "prepared, committed", [("restart", "inplace"), ("inplace", "restart"), ("restart", "restart")]
)
def test_a_commit_of_what_was_not_prepared_in_place_is_refused_and_changes_nothing(
    run: RunDir, v0: Manifest, prepared: str, committed: str
) -> None:
    async def body() -> None:
        guarded = guard(run)
        await guarded.refresh(v0)
        v1 = publish_full(run, 1)
        assert (await guarded.give("prepare", guarded.order(v1, method=prepared))).status_code == 200
        guarded.engine.log.clear()
        response = await guarded.give("commit", guarded.order(v1, method=committed))
        assert (response.status_code, response.json()["kind"]) == (409, "not_prepared")
        assert f"by the method {prepared}, the commit says {committed}" in response.json()["error"]
        assert not guarded.engine.log
        assert (await guarded.generate()).headers["x-libra-version"] == "0"
        assert (await guarded.refresh(v1)).status_code == 200

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


def test_a_server_started_from_a_version_serves_nothing_when_its_tensors_are_others(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run, start_version=0)
        guarded.engine.swap_fault = "embed in the engine does not hold model.embed"
        response = await guarded.give("prove", guarded.order(v0))
        assert (response.status_code, response.json()["tensor"]) == (500, "model.embed")
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
