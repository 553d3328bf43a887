"""Real rollout instances for tests: an agent process with its vLLM server, and a client that checks every answer."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from transformers import LlamaForCausalLM

from stages.files import read_json, wait_for
from stages.rollout.orphans import environment_of, marked_pids
from stages.rollout.settings import SERVER_ID_VARIABLE
from stages.rundir import RunDir
from stages.weights.manifest import Manifest, Probe
from stages.weights.records import RefreshRequest
from tests.rollout_kit import (
    cpu_config,
    logprobs_of,
    make_run,
    publish_model,
    save_model,
    tiny_model,
)

NAME = "rollout_000"
REPOSITORY = Path(__file__).parents[1]
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
                raise AssertionError(f"the agent ended with {self.agent.returncode}: {self.agent.communicate()[1]}")

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
