"""A rollout instance with a real vLLM server on the CPU: what it generates, how it is refreshed, how it ends.

Two instances (three servers, about 10 s each on two idle cores). Tests of one instance build on each other's versions,
in the order in which they stand here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from stages.files import read_json, wait_for
from stages.rollout import memory_folder
from stages.rollout.orphans import environment_of, marked_pids
from stages.rollout.settings import SERVER_ID_VARIABLE
from stages.weights.filesystems import lies_on_a_disk_here
from stages.weights.manifest import Manifest, Probe
from stages.weights.publish import Publisher
from tests.engine_kit import part_sums_on_the_host
from tests.rollout_instances import (
    AGENT,
    NAME,
    REPOSITORY,
    Instance,
    processes_of,
    start_instance,
    stop_instance,
)
from tests.rollout_kit import (
    PROBE_IDS,
    TOLERANCE,
    cpu_config,
    logprobs_of,
    make_run,
    probe_of,
    publish_model,
    published_tensors,
    save_model,
    tiny_model,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

UNDER_LOAD = range(2, 22)
IN_FLIGHT_TOKENS = [160 - 9 * index for index in range(8)]
"""Of each client: answers wait for the proof and come out together, so with one length for all they would end together too, and
some switch would find nothing in flight."""

# ---- one server through many versions --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    instance = start_instance(tmp_path_factory.mktemp("served"))
    yield instance
    stop_instance(instance)


def test_before_its_first_proof_a_server_generates_nothing(served: Instance) -> None:
    assert served.generate([[5, 6, 7]]).status_code == 503
    assert served.status()["version"] == -1


def test_reloading_the_start_weights_changes_nothing_and_is_proved(served: Instance) -> None:
    manifest = publish_model(served.run, 0, served.models[0], served.source)

    loaded = served.refresh(manifest)

    assert loaded["proof"]["tokens"] == len(PROBE_IDS) - 1
    assert loaded["proof"]["max_difference"] < 1e-4
    assert served.status()["version"] == 0


def test_every_route_of_vllm_wants_the_token(served: Instance) -> None:
    log = (served.run.logs / f"{NAME}.server.log").read_text()
    routes = set(re.findall(r"Route: (\S+), Methods: (\w+)", log))
    assert len(routes) > 20

    answers = {
        (path, method): httpx.request(method, f"{served.http.base_url}{path}", timeout=10).status_code
        for path, method in routes
    }

    assert set(answers.values()) == {401}, {route: code for route, code in answers.items() if code != 401}


def test_log_probs_are_those_of_the_distribution_that_was_sampled(served: Instance) -> None:
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13], [60]]

    for temperature in (1.0, 0.6):
        answer = served.generate(prompts, n=4, temperature=temperature)
        assert answer.status_code == 200
        assert served.largest_difference(answer, prompts, temperature) < 1e-3


def test_new_weights_are_served_after_a_refresh(served: Instance) -> None:
    prompts = [[5, 6, 7], list(range(4, 60)) * 3]  # the second fills a block of the prefix cache
    served.generate(prompts)

    loaded = served.refresh(served.publish(1, seed=1))
    answer = served.generate(prompts, n=2)

    assert answer.headers["x-libra-version"] == "1"
    assert [choice["version_segments"] for choice in answer.json()["choices"]] == [[[1, 8]]] * 4
    assert served.largest_difference(answer, prompts) < 1e-3
    assert loaded["proof"]["max_difference"] < TOLERANCE
    assert loaded["server_response"]["prefix_cache_checked"] is True
    assert 0 < loaded["paused_s"] < loaded["total_reload_s"]


def test_requests_in_flight_live_through_20_refreshes_with_exact_segments(served: Instance) -> None:
    prompts = [[4 + index, 5, 6, 7] for index in range(len(IN_FLIGHT_TOKENS))]
    manifests = [served.publish(version, seed=version) for version in UNDER_LOAD]
    answers: list[list[httpx.Response]] = [[] for _ in prompts]
    enough = threading.Event()

    def keep_generating(index: int) -> None:
        while not enough.is_set():
            answers[index].append(served.generate([prompts[index]], n=2, max_tokens=IN_FLIGHT_TOKENS[index]))

    with ThreadPoolExecutor(len(prompts)) as pool:
        flights = [pool.submit(keep_generating, index) for index in range(len(prompts))]
        try:
            served.awaited("a first answer to everyone", lambda: all(answers))
            loaded = [served.refresh(manifest) for manifest in manifests]
        finally:
            enough.set()
        for flight in flights:
            flight.result(60)

    crossed: Counter[tuple[int, int]] = Counter()
    for prompt, tokens, mine in zip(prompts, IN_FLIGHT_TOKENS, answers, strict=True):
        for answer in mine:
            assert answer.status_code == 200, answer.text
            assert served.largest_difference(answer, [prompt]) < 1e-3
            choices = answer.json()["choices"]
            assert len(choices) == 2
            for choice in choices:
                segments = choice["version_segments"]
                assert sum(length for _, length in segments) == len(choice["token_ids"]) == tokens
                crossed.update(pairwise(version for version, _ in segments))
    assert set(crossed) == {(version - 1, version) for version in UNDER_LOAD}, (
        "each switch had requests in flight, no other"
    )
    assert [each["version"] for each in loaded] == list(UNDER_LOAD)
    stopped, proved, total = (
        median(each)
        for each in zip(*((_stopped_s(each), each["paused_s"], each["total_reload_s"]) for each in loaded), strict=True)
    )
    print(f"medians: generation paused {stopped:.4f} s, with the proof {proved:.4f} s, refresh {total:.4f} s")
    assert 0 < stopped < total / 2


def _stopped_s(loaded: dict[str, Any]) -> float:
    return float(loaded["server_response"]["generation_paused_s"])


def test_a_flipped_byte_is_refused_by_the_tensor_s_name_and_the_old_version_is_served_on(served: Instance) -> None:
    manifest = served.publish(22, seed=22)
    name = "model.layers.1.mlp.down_proj.weight"
    _flip_a_byte(served, manifest, name)

    served.request(manifest)
    nack = served.answer_to(manifest, "nack")
    answer = served.generate([[5, 6, 7]])

    assert (nack["phase"], nack["tensor"], nack["serving_version"]) == ("prepare", name, 21)
    assert (answer.status_code, answer.headers["x-libra-version"]) == (200, "21")
    assert served.largest_difference(answer, [[5, 6, 7]]) < 1e-3


def _flip_a_byte(served: Instance, manifest: Manifest, name: str) -> None:
    path = served.run.weights_version(manifest.version) / manifest.tensors[name].file
    data = bytearray(path.read_bytes())
    data[manifest.tensors[name].offset + 3] ^= 0x40
    path.write_bytes(data)


def test_many_prompts_in_one_request_are_answered_in_order(served: Instance) -> None:
    prompts = [[4 + index % 50, 5, 6, 4 + index % 7] for index in range(64)]

    answer = served.generate(prompts, n=8)

    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(512))
    assert served.largest_difference(answer, prompts) < 1e-3


def test_a_delta_goes_into_the_engine_in_place(served: Instance) -> None:
    options = replace(cpu_config(served.source).weights, delta="sparse")
    with Publisher(served.run, source_folder=served.source, options=options) as publisher:
        for version in (23, 24):
            model = served.models[version] = tiny_model(23)
            if version == 24:
                model.get_input_embeddings().weight.data[::9] *= 1.5
            manifest = publisher.begin(version, version, published_tensors(model), probe_of(model)).finish()
            served.refresh(manifest)

    assert manifest.delta is not None
    answer = served.generate([[5, 6, 7, 9, 18, 27]])
    assert answer.headers["x-libra-version"] == "24"
    assert served.largest_difference(answer, [[5, 6, 7, 9, 18, 27]]) < 1e-3


def test_what_a_trainer_s_gpu_summed_up_is_read_by_the_agent(served: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    part_sums_on_the_host(monkeypatch)

    for version in (25, 26):
        (worker,) = served.refresh(served.publish(version, seed=version))["server_response"]["workers"]
        assert worker["published_sums"] == worker["copies"] > 0
        assert not worker["read_here"]

    answer = served.generate([[5, 6, 7]])
    assert answer.headers["x-libra-version"] == "26"
    assert served.largest_difference(answer, [[5, 6, 7]]) < 1e-3


def test_damage_that_the_agent_meets_is_refused_by_the_engine_s_worker(
    served: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_sums_on_the_host(monkeypatch)
    manifest, name = served.publish(27, seed=27), "model.layers.0.mlp.down_proj.weight"
    _flip_a_byte(served, manifest, name)

    served.request(manifest)
    nack = served.answer_to(manifest, "nack")

    assert (nack["phase"], nack["tensor"], nack["serving_version"]) == ("prepare", name, 26)


def _open_files(served: Instance) -> str:
    """Of the agent."""
    found = []
    for fd in Path(f"/proc/{served.agent.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(fd))
    return " ".join(found)


def test_a_version_is_read_while_it_is_written(served: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    if not lies_on_a_disk_here(served.run.weights):
        pytest.skip(f"{served.run.weights} lies on no disk of this host: nothing is read ahead there")
    part_sums_on_the_host(monkeypatch)
    monkeypatch.setattr(Publisher, "tells_progress", True)
    model = served.models[28] = tiny_model(28)
    (name,) = memory_folder._place(served.run.run_id).glob("weights-*.lock")
    with Publisher(served.run, source_folder=served.source, options=cpu_config(served.source).weights) as publisher:
        publication = publisher.begin(28, 28, published_tensors(model), probe_of(model))
        served.awaited("the agent's reading", lambda: ".parts.0.jsonl" in _open_files(served))
        manifest = publication.finish()
    served.awaited("the end of the reading", lambda: name.read_text().startswith("version 28 "))

    (worker,) = served.refresh(manifest)["server_response"]["workers"]

    answer = served.generate([[5, 6, 7]])
    assert not worker["read_here"]
    assert answer.headers["x-libra-version"] == "28"
    assert served.largest_difference(answer, [[5, 6, 7]]) < 1e-3


def test_a_probe_that_the_weights_do_not_reproduce_ends_the_instance_and_nothing_is_served(served: Instance) -> None:
    truth = logprobs_of(tiny_model(29), list(PROBE_IDS))
    manifest = served.publish(29, seed=29, probe=Probe(PROBE_IDS, (*truth[:-1], truth[-1] - 0.1)))
    pids = processes_of(served)

    served.request(manifest)
    code, errors = served.end(30)
    nack = read_json(served.run.ack_json(29, NAME, "nack")) or {}

    assert code != 0
    assert re.search(r"UnprovedWeightsError.*differs by 0\.(1|09999)", errors)
    assert (nack["phase"], nack["serving_version"]) == ("proof", -1)
    assert len(pids) >= 2
    assert not any(environment_of(pid).get(SERVER_ID_VARIABLE) for pid in pids)


# ---- restart, then a sudden death ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    instance = start_instance(tmp_path_factory.mktemp("restarted"))
    yield instance
    stop_instance(instance)


def test_the_restart_method_serves_new_weights_from_a_new_process(restarted: Instance) -> None:
    before = restarted.status()

    loaded = restarted.refresh(restarted.publish(3, seed=3), method="restart", strategy="serial")
    restarted.wait_ready()
    answer = restarted.generate([[5, 6, 7]], n=4)

    assert restarted.status()["server_pid"] != before["server_pid"]
    assert [choice["version_segments"] for choice in answer.json()["choices"]] == [[[3, 8]]] * 4
    assert restarted.largest_difference(answer, [[5, 6, 7]]) < 1e-3
    assert loaded["process_stop_s"] > 0
    assert loaded["model_load_s"] > loaded["process_stop_s"]


def test_the_sudden_death_of_the_server_is_an_error_at_once_and_leaves_no_process(restarted: Instance) -> None:
    pids = processes_of(restarted)
    url = restarted.status()["base_url"]

    os.kill(restarted.status()["server_pid"], signal.SIGKILL)
    code, errors = restarted.end(10)

    assert code != 0
    assert "ServerDiedError" in errors
    assert "SIGKILL" in errors
    assert len(pids) >= 2
    assert not any(environment_of(pid).get(SERVER_ID_VARIABLE) for pid in pids)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


# ---- starts that come to nothing ----------------------------------------------------------------------------------------------


def test_a_vllm_that_cannot_start_is_reported_with_its_own_words(tmp_path: Path) -> None:
    source = save_model(tiny_model(0), tmp_path / "model")
    config = cpu_config(source)
    config.rollout.extra_args = ["--block-size", "thirty"]
    run = make_run(tmp_path / "run", config)

    agent = subprocess.run(
        [sys.executable, "-c", AGENT, str(run.root)], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )

    assert agent.returncode != 0
    assert "VllmStartError" in agent.stderr
    assert "invalid int value: 'thirty'" in agent.stderr


def test_an_agent_that_is_killed_while_its_server_starts_leaves_no_process(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", cpu_config(save_model(tiny_model(0), tmp_path / "model")))
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(run.root)], cwd=REPOSITORY)
    try:
        status = wait_for(
            lambda: found if (found := run.read(run.instance_json(NAME))) and found["server_pid"] else None,
            deadline_s=60,
            awaited="a server",
            from_whom="the agent",
        )
        server_id = environment_of(status["server_pid"])[SERVER_ID_VARIABLE]
        log = run.logs / f"{NAME}.server.log"
        wait_for(lambda: log.stat().st_size or None, deadline_s=60, awaited="output", from_whom="vLLM")
    finally:
        agent.kill()
        agent.wait()

    wait_for(
        lambda: None if marked_pids(server_id) else True,
        deadline_s=10,
        awaited="the end of the server",
        from_whom="the kernel",
    )
