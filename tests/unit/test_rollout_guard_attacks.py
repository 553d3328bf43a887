"""Attempts to harm an instance by somebody who holds the token, or who can write into the run: each is refused, nothing changes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from conf.sections import WeightsConfig
from stages.rollout.guard import MAX_ORDER_BYTES
from stages.rollout.orders import LONGEST_DEADLINE_S, MOST_NUMBER
from stages.rundir import RunDir
from stages.weights.manifest import Manifest
from tests.rollout_guard_kit import Guarded, guard, in_loop, run_with_token
from tests.weights_kit import publish_full, small_tensors


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_with_token(tmp_path / "run")


@pytest.fixture
def v0(run: RunDir) -> Manifest:
    return publish_full(run, 0)


def refused(run: RunDir, v0: Manifest, spoil: Callable[[Guarded], Any], **changes: Any) -> dict[str, Any]:
    """Give the order to prepare version 1 to an instance that serves version 0; `spoil` makes the version, and may return it.

    Checks that the order is refused, that the engine was not stopped, and that version 0 is served on.
    """
    answers: list[dict[str, Any]] = []

    async def body() -> None:
        guarded = guard(run)
        assert (await guarded.refresh(v0)).status_code == 200
        made = spoil(guarded)
        manifest = made if isinstance(made, Manifest) else publish_full(run, 1)
        before = len(guarded.engine.log)
        response = await guarded.give(
            "prepare", {**guarded.order(manifest), "version": 1, "path": "weights/v000001"} | changes
        )
        assert 400 <= response.status_code < 500, response.text
        assert (await guarded.give("commit", guarded.order(manifest) | changes)).status_code >= 400
        assert "pause" not in guarded.engine.log[before:]
        assert (guarded.reloads.state()["version"], guarded.reloads.state()["shut_because"]) == (0, "")
        assert (await guarded.generate()).status_code == 200
        answers.append({"status": response.status_code, **response.json()})

    in_loop(body)
    return answers[0]


# ---- what lies in weights/ -------------------------------------------------------------------------------------------


def test_a_version_copied_from_another_run_is_refused(run: RunDir, v0: Manifest, tmp_path: Path) -> None:
    def copy(_guarded: Guarded) -> Manifest:
        other = run_with_token(tmp_path / "other")
        manifest = publish_full(other, 1)
        shutil.copytree(other.weights_version(1), run.weights_version(1))
        return manifest

    answer = refused(run, v0, copy)

    assert answer["kind"] == "unfit_weights"
    assert "no manifest of this run" in answer["error"]


def test_a_manifest_that_was_edited_is_refused(run: RunDir, v0: Manifest) -> None:
    def edit(_guarded: Guarded) -> Manifest:
        manifest = publish_full(run, 1)
        path = run.weights_version(1) / "manifest.json"
        record = json.loads(path.read_text())
        record["step"] = 7
        path.write_text(json.dumps(record))
        return manifest

    assert "digest" in refused(run, v0, edit)["error"]


def test_an_older_version_under_the_number_of_a_newer_one_is_refused(run: RunDir, v0: Manifest) -> None:
    def rename(guarded: Guarded) -> Manifest:
        shutil.copytree(run.weights_version(0), run.weights_version(1))
        return v0

    assert "version" in refused(run, v0, rename)["error"]


@pytest.mark.parametrize("damage", ["shape", "dtype", "missing", "extra"])
def test_tensors_that_the_model_does_not_have_are_refused_by_name(run: RunDir, v0: Manifest, damage: str) -> None:
    def spoil(_guarded: Guarded) -> Manifest:
        tensors = small_tensors(1)
        if damage == "shape":
            tensors["model.layer.up"] = tensors["model.layer.up"].T.contiguous()
        elif damage == "missing":
            del tensors["model.layer.up"]
        elif damage == "extra":
            tensors["model.layer.up.bias"] = tensors["model.layer.norm"]
        dtype = "bfloat16" if damage == "dtype" else "float32"
        return publish_full(run, 1, tensors, WeightsConfig(dtype=dtype))

    answer = refused(run, v0, spoil)

    assert answer["kind"] == "unfit_weights"
    assert answer["tensor"].startswith("model.")


def replace_file(run: RunDir, make: Callable[[Path], None]) -> Callable[[Guarded], Manifest]:
    def spoil(_guarded: Guarded) -> Manifest:
        manifest = publish_full(run, 1)
        file = run.weights_version(1) / "model.safetensors"
        aside = run.root.parent / "outside.safetensors"
        file.rename(aside)
        make(file)
        return manifest

    return spoil


def test_a_weight_file_that_is_a_link_out_of_the_run_is_refused(run: RunDir, v0: Manifest) -> None:
    """The bytes behind it are the right ones: what is refused is the way."""
    link = replace_file(run, lambda file: file.symlink_to(run.root.parent / "outside.safetensors"))

    answer = refused(run, v0, link, method="restart")  # in place, the workers read; the reader is the same

    assert (answer["status"], answer["kind"]) == (403, "outside_weights")


@pytest.mark.parametrize(
    "make", [lambda file: None, os.mkfifo, Path.mkdir, Path.touch], ids=["missing", "fifo", "folder", "empty"]
)
def test_a_weight_file_that_is_none_is_refused_without_waiting_for_it(
    run: RunDir, v0: Manifest, make: Callable[[Path], None]
) -> None:
    assert refused(run, v0, replace_file(run, make), method="restart")["kind"] == "unfit_weights"


def test_a_weights_folder_that_is_a_link_to_another_run_is_refused(run: RunDir, v0: Manifest, tmp_path: Path) -> None:
    async def body() -> None:
        guarded = guard(run)
        manifest = publish_full(run, 1)
        run.weights.rename(tmp_path / "elsewhere")
        run.weights.symlink_to(tmp_path / "elsewhere")
        response = await guarded.give("prepare", guarded.order(manifest))
        assert (response.status_code, response.json()["kind"]) == (403, "outside_weights")
        assert guarded.engine.log == []

    in_loop(body)


# ---- what an order may say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "weights/v000001\x00"},
        {"path": "\ud800"},
        {"path": "weights/" + "a" * 5000},
        {"path": ["weights/v000001"]},
        {"run_id": None},
        {"digest": "é" * 32},
        {"version": MOST_NUMBER + 1},
        {"version": 1.0},
        {"attempt": -1},
        {"deadline_s": LONGEST_DEADLINE_S * 2},
        {"deadline_s": True},
        {"deadline_s": "60"},
        {"method": ""},
    ],
)
def test_values_that_no_agent_sends_are_refused(run: RunDir, v0: Manifest, changes: dict[str, Any]) -> None:
    def nothing(_guarded: Guarded) -> None:
        return None

    assert refused(run, v0, nothing, **changes)["kind"] == "bad_request"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b"\xff\xfe{}",
        b'{"version": ' + b"9" * 5_000 + b"}",
        b"null",
        b'"text"',
    ],
    ids=["nested lists", "nested objects", "utf-16", "endless number", "null", "text"],
)
def test_bodies_that_are_no_order_are_refused(run: RunDir, v0: Manifest, body: bytes) -> None:
    async def give() -> None:
        guarded = guard(run)
        for what in ("prepare", "commit", "prove"):
            response = await guarded.client.post(f"/libra/{what}", content=body)
            assert (response.status_code, response.json()["kind"]) == (400, "bad_request")

    in_loop(give)


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999"])
def test_a_deadline_that_is_no_number_of_seconds_is_refused(run: RunDir, v0: Manifest, number: str) -> None:
    async def give() -> None:
        guarded = guard(run)
        body = json.dumps(guarded.order(v0)).replace('"deadline_s": 5.0', f'"deadline_s": {number}')
        assert number in body
        response = await guarded.client.post("/libra/prepare", content=body.encode())
        assert (response.status_code, response.json()["kind"]) == (400, "bad_request")

    in_loop(give)


@pytest.mark.parametrize("announced", ["-1", "+5", "0x10", "1_000", str(MAX_ORDER_BYTES + 1), "9" * 400, "\u0665"])
def test_an_order_that_announces_a_wrong_length_is_refused(run: RunDir, v0: Manifest, announced: str) -> None:
    async def give() -> None:
        guarded = guard(run)
        headers = {b"Content-Length": announced.encode()}
        response = await guarded.client.post("/libra/prepare", content=b"{}", headers=headers)
        assert response.status_code in (400, 413)
        assert response.json()["kind"] in ("bad_request", "too_large")

    in_loop(give)


# ---- several at once -------------------------------------------------------------------------------------------------


def test_of_many_reloads_at_once_one_is_carried_out_and_the_others_are_refused(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        manifests = [v0, *(publish_full(run, version) for version in range(1, 6))]
        answers = await asyncio.gather(*(guarded.give("prepare", guarded.order(manifest)) for manifest in manifests))
        assert sorted(answer.status_code for answer in answers) == [200] + [409] * 5
        won = manifests[[answer.status_code for answer in answers].index(200)]
        answers = await asyncio.gather(*(guarded.give("commit", guarded.order(manifest)) for manifest in manifests * 2))
        assert sorted(answer.status_code for answer in answers) == [200] + [409] * 11
        assert guarded.reloads.state()["version"] == won.version
        assert guarded.engine.log.count("pause") == guarded.engine.log.count("resume") == 1

    in_loop(body)


def test_a_version_is_committed_once(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        assert (await guarded.refresh(v0)).status_code == 200
        again = await guarded.give("commit", guarded.order(v0))
        assert (again.status_code, again.json()["kind"]) == (409, "not_prepared")
        assert guarded.engine.log.count("libra_swap") == 1

    in_loop(body)


def test_an_order_that_never_ends_keeps_no_other_order_waiting(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        never = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            yield json.dumps(guarded.order(v0)).encode()[:20]
            await never.wait()

        slow = asyncio.create_task(guarded.client.post("/libra/prepare", content=endless()))
        await asyncio.sleep(0)
        assert (await guarded.refresh(v0)).status_code == 200
        slow.cancel()

    in_loop(body)


def test_a_filesystem_that_fails_is_a_refusal_with_the_reason(run: RunDir, v0: Manifest) -> None:
    async def body() -> None:
        guarded = guard(run)
        assert (await guarded.refresh(v0)).status_code == 200
        manifest = publish_full(run, 1)

        def stale(*_: Any) -> None:
            raise OSError(116, "Stale file handle")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("stages.rollout.reload.load_manifest", stale)
            response = await guarded.give("prepare", guarded.order(manifest))
        assert (response.status_code, response.json()["kind"]) == (500, "io_error")
        assert "Stale file handle" in response.json()["error"]
        assert (await guarded.refresh(manifest)).status_code == 200  # and it may be tried again

    in_loop(body)
