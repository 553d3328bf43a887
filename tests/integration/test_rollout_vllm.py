"""A rollout instance with a real vLLM server on the CPU: what it generates, how it is refreshed, how it ends.

Four servers are started in this file (about 10 s each on two idle cores). Tests of one server build on each other's
versions, in the order in which they stand here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import LlamaForCausalLM

from stages.files import read_json, wait_for
from stages.rollout import server_process
from stages.rollout.command import ServerCommand, server_command
from stages.rollout.orders import Order
from stages.rollout.orphans import environment_of, marked_pids
from stages.rollout.server_process import ServerProcess
from stages.rollout.settings import SERVER_ID_VARIABLE, ServerSettings
from stages.rundir import RunDir
from stages.weights.manifest import Manifest, Probe
from stages.weights.records import RefreshRequest
from tests.rollout_faults import FOLDER_VARIABLE
from tests.rollout_kit import (
    PROBE_IDS,
    TOLERANCE,
    cpu_config,
    logprobs_of,
    make_run,
    publish_model,
    save_model,
    tiny_model,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

NAME = "rollout_000"
REPOSITORY = Path(__file__).parents[2]
AGENT = """
import sys
from stages.context import StoppedError, open_context
from stages.process import die_with_parent, install_stop_handlers
from stages.rollout.stage import run
die_with_parent()
with open_context("rollout", sys.argv[1], name="rollout_000") as context:
    install_stop_handlers(context.stop)
    try:
        run(context)
    except StoppedError:
        print("stopped")
"""


@dataclass
class Client:
    """Talks to one server; `models` are the weights of each version, for comparison."""

    http: httpx.Client
    models: dict[int, LlamaForCausalLM] = field(default_factory=dict)

    def generate(self, prompts: list[list[int]], **changes: Any) -> httpx.Response:
        body = {
            "model": "policy",
            "prompt": prompts,
            "n": 1,
            "max_tokens": 8,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        return self.http.post("/v1/completions", json=body | changes)

    def largest_difference(self, answer: httpx.Response, prompts: list[list[int]], temperature: float = 1.0) -> float:
        """Between vLLM's log-prob of every generated token and that of the model whose version the token claims, in nats."""
        choices = answer.json()["choices"]
        n = len(choices) // len(prompts)
        worst = 0.0
        for index, choice in enumerate(choices):
            prompt, ids = prompts[index // n], choice["token_ids"]
            versions = [version for version, length in choice["version_segments"] for _ in range(length)]
            assert len(versions) == len(ids) == len(choice["logprobs"]["token_logprobs"])
            wanted = {
                version: logprobs_of(self.models[version], prompt + ids, temperature)[len(prompt) - 1 :]
                for version in set(versions)
            }
            for position, (version, found) in enumerate(
                zip(versions, choice["logprobs"]["token_logprobs"], strict=True)
            ):
                worst = max(worst, abs(found - wanted[version][position]))
        return worst


@dataclass
class Instance(Client):
    """An agent process and its server."""

    run: RunDir = field(kw_only=True)
    source: Path = field(kw_only=True)
    agent: subprocess.Popen[str] = field(kw_only=True)

    def status(self) -> dict[str, Any]:
        return self.run.read(self.run.instance_json(NAME)) or {"state": "none"}

    def wait_ready(self) -> None:
        self.awaited("readiness", lambda: self.status()["state"] == "ready")
        self.http.base_url = httpx.URL(self.status()["base_url"])

    def awaited(self, what: str, look: Any, deadline_s: float = 120.0) -> Any:
        def check() -> None:
            if self.agent.poll() is not None:
                raise AssertionError(f"the agent ended with {self.agent.returncode}")

        return wait_for(lambda: look() or None, deadline_s=deadline_s, awaited=what, from_whom="the agent", check=check)

    def publish(self, version: int, seed: int, probe: Probe | None = None) -> Manifest:
        self.models[version] = tiny_model(seed)
        return publish_model(self.run, version, self.models[version], self.source, probe)

    def request(self, manifest: Manifest, *, method: str = "inplace", strategy: str = "parallel") -> None:
        version = manifest.version
        wanted = RefreshRequest(
            version, f"weights/v{version:06d}", manifest.digest, method, strategy, (NAME,), 60.0, time.time()
        )
        self.run.write(self.run.request_json(version), wanted.to_record())

    def answer_to(self, manifest: Manifest, phase: str) -> dict[str, Any]:
        path = self.run.ack_json(manifest.version, NAME, phase)
        found: dict[str, Any] = self.awaited(f"{phase} of version {manifest.version}", lambda: read_json(path))
        return found

    def refresh(self, manifest: Manifest, **how: str) -> dict[str, Any]:
        self.request(manifest, **how)
        return self.answer_to(manifest, "loaded")

    def end(self, deadline_s: float) -> tuple[int, str]:
        """Exit code and error output of the agent, which must end within `deadline_s`."""
        _, errors = self.agent.communicate(timeout=deadline_s)
        return self.agent.returncode, errors


def token_headers(run: RunDir) -> dict[str, str]:
    return {"Authorization": f"Bearer {run.token_file.read_text().strip()}"}


def start_instance(folder: Path) -> Instance:
    model = tiny_model(0)
    source = save_model(model, folder / "model")
    run = make_run(folder / "run", cpu_config(source))
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(run.root)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    http = httpx.Client(timeout=60, headers=token_headers(run))
    instance = Instance(http, {0: model}, run=run, source=source, agent=agent)
    instance.wait_ready()
    return instance


def stop_instance(instance: Instance) -> None:
    instance.http.close()
    if instance.agent.poll() is None:
        instance.agent.terminate()
        try:
            instance.agent.wait(20)
        finally:
            instance.agent.kill()
            instance.agent.wait()


def processes_of(instance: Instance) -> list[int]:
    server_id = environment_of(instance.status()["server_pid"])[SERVER_ID_VARIABLE]
    return marked_pids(server_id)


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


def test_requests_in_flight_live_through_refreshes_with_exact_segments(served: Instance) -> None:
    prompts = [[4 + index, 5, 6, 7] for index in range(8)]
    manifests = [served.publish(version, seed=version) for version in (2, 3, 4)]

    with ThreadPoolExecutor(len(prompts)) as pool:
        flights = [pool.submit(served.generate, [prompt], n=4, max_tokens=240) for prompt in prompts]
        for manifest in manifests:
            served.awaited("work in flight", lambda: not all(flight.done() for flight in flights))
            served.refresh(manifest)
        answers = [flight.result() for flight in flights]

    assert [answer.status_code for answer in answers] == [200] * len(prompts)
    mixed = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        for choice in answer.json()["choices"]:
            assert sum(length for _, length in choice["version_segments"]) == len(choice["token_ids"]) == 240
            mixed += len(choice["version_segments"]) > 1
        assert served.largest_difference(answer, [prompt]) < 1e-3
    assert mixed > 0, "no request was in flight during a refresh"


def test_a_flipped_byte_is_refused_by_the_tensor_s_name_and_the_old_version_is_served_on(served: Instance) -> None:
    manifest = served.publish(5, seed=5)
    name = "model.layers.1.mlp.down_proj.weight"
    path = served.run.weights_version(5) / manifest.tensors[name].file
    data = bytearray(path.read_bytes())
    data[manifest.tensors[name].offset + 3] ^= 0x40
    path.write_bytes(data)

    served.request(manifest)
    nack = served.answer_to(manifest, "nack")
    answer = served.generate([[5, 6, 7]])

    assert (nack["phase"], nack["tensor"], nack["serving_version"]) == ("prepare", name, 4)
    assert (answer.status_code, answer.headers["x-libra-version"]) == (200, "4")
    assert served.largest_difference(answer, [[5, 6, 7]]) < 1e-3


def test_many_prompts_in_one_request_are_answered_in_order(served: Instance) -> None:
    prompts = [[4 + index % 50, 5, 6, 4 + index % 7] for index in range(64)]

    answer = served.generate(prompts, n=8)

    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(512))
    assert served.largest_difference(answer, prompts) < 1e-3


def test_a_probe_that_the_weights_do_not_reproduce_ends_the_instance_and_nothing_is_served(served: Instance) -> None:
    truth = logprobs_of(tiny_model(6), list(PROBE_IDS))
    manifest = served.publish(6, seed=6, probe=Probe(PROBE_IDS, (*truth[:-1], truth[-1] - 0.1)))
    pids = processes_of(served)

    served.request(manifest)
    code, errors = served.end(30)
    nack = read_json(served.run.ack_json(6, NAME, "nack")) or {}

    assert code != 0
    assert re.search(r"UnprovedWeightsError.*differs by 0\.1", errors)
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


# ---- tied embeddings, and the two silent faults ----------------------------------------------------------------------


@dataclass
class Faulty(Client):
    """A server of a tied model that can be made to commit the faults of `tests.rollout_faults`."""

    run: RunDir = field(kw_only=True)
    source: Path = field(kw_only=True)
    faults: Path = field(kw_only=True)

    def refresh(self, version: int, fault: str = "") -> httpx.Response:
        """Prepare and commit a new version while `fault` is on; the answer to the commit."""
        self.models[version] = tiny_model(version, tied=True)
        manifest = publish_model(self.run, version, self.models[version], self.source)
        path = f"weights/v{version:06d}"
        order = Order(self.run.run_id, self.run.attempt, version, path, manifest.digest, "inplace", 60.0)
        if fault:
            (self.faults / fault).touch()
        try:
            self.http.post("/libra/prepare", json=asdict(order)).raise_for_status()
            return self.http.post("/libra/commit", json=asdict(order))
        finally:
            (self.faults / fault).unlink(missing_ok=True) if fault else None


def faulty_command(*args: Any, **kwargs: Any) -> ServerCommand:
    made = server_command(*args, **kwargs)
    swapped = {
        "stages.rollout.guard.GuardMiddleware": "tests.rollout_faults.FaultyGuard",
        "stages.rollout.worker.WeightWorker": "tests.rollout_faults.FaultyWorker",
    }
    return replace(made, arguments=[swapped.get(argument, argument) for argument in made.arguments])


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faults").mkdir()
    source = save_model(tiny_model(0, tied=True), folder / "model")
    config = cpu_config(source)
    run = make_run(folder / "run", config)
    settings = ServerSettings(
        run_root=str(run.root),
        run_id=run.run_id,
        attempt=0,
        instance=NAME,
        token_file=str(run.token_file),
        start_folder=str(source),
        start_version=0,
        serve_unproved=False,
        weights_dtype="float32",
        proof_tolerance=TOLERANCE,
        agent_pid=os.getpid(),
        listen_fd=-1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder / "faults"))
        patch.setattr(server_process, "server_command", faulty_command)
        server = ServerProcess.start(config, settings, tp=1, num_threads=1, log_path=folder / "server.log")
    try:
        http = httpx.Client(base_url=server.base_url, timeout=60, headers=token_headers(run))

        def is_up() -> bool | None:
            assert not server.wait_for_end(0), server.log_tail()
            try:
                return http.get("/libra/state").status_code == 200 or None
            except httpx.ConnectError:
                return None

        wait_for(is_up, deadline_s=120, awaited="the server", from_whom="vLLM")
        yield Faulty(http, run=run, source=source, faults=folder / "faults")
        http.close()
    finally:
        server.stop(10)


def test_a_tied_model_is_exact_after_a_reload_in_place(faulty: Faulty) -> None:
    for version in (1, 2):
        assert faulty.refresh(version).status_code == 200
        assert faulty.largest_difference(faulty.generate([[5, 6, 7]], n=4), [[5, 6, 7]]) < 1e-3


@pytest.mark.parametrize(
    "version, fault, symptom", [(3, "forgotten_repack", "differs by"), (5, "forgotten_reset", "prefix cache")]
)
def test_the_proof_catches_a_silent_fault_of_the_engine(faulty: Faulty, version: int, fault: str, symptom: str) -> None:
    answer = faulty.refresh(version, fault)

    assert (answer.status_code, answer.json()["kind"]) == (500, "proof_failed")
    assert symptom in answer.json()["error"]
    assert faulty.generate([[5, 6, 7]]).status_code == 503
    assert faulty.refresh(version + 1).status_code == 200
    assert faulty.largest_difference(faulty.generate([[5, 6, 7]]), [[5, 6, 7]]) < 1e-3


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
