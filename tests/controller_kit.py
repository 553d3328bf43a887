"""What the contract tests of the controller share: a toy task, a scripted HTTP server, a trainer that only signs.

These are test doubles: the server answers from a script, the trainer writes records and no weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from omegaconf import OmegaConf

from conf.schema import LibraConfig
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.batches import Batch, BatchManifest, read_batch
from stages.controller.tasks.base import Problem, Task
from stages.desired import DesiredState, StepSpec, write_desired
from stages.files import wait_for
from stages.rundir import RunDir
from stages.warmup.vocabulary import EOS_ID, build_tokenizer, save_tokenizer
from stages.weights.instances import InstanceStatus, write_status

TOKEN = "secret-of-the-tests"
TOKENIZER = build_tokenizer("0123456789", [])
WAIT_S = 20.0


class SuccessorTask(Task):
    """Say the number that follows. Test problems are negative, so they share nothing with the stream."""

    def train_problem(self, index: int) -> Problem:
        return Problem(str(10 + index), str(11 + index))

    def test_problems(self) -> list[Problem]:
        return [Problem(f"00{i}", f"{i + 1}") for i in range(self.test_size)]

    def score(self, completion: str, problem: Problem) -> float:
        return float(completion == problem.answer)


def small_config(model_path: Path, **options: Any) -> LibraConfig:
    """4 groups of 2 in a batch, 3 steps, short deadlines."""
    base: dict[str, Any] = {
        "model_path": str(model_path),
        "batch_size": 8,
        "n_samples": 2,
        "total_steps": 3,
        "max_new_tokens": 8,
        "max_model_len": 32,
        "max_concurrent_rollouts": 64,
        "max_head_offpolicyness": 0,
        "phase_trace_enabled": True,
        "task": {"name": f"{__name__}:SuccessorTask", "test_size": 5, "test_samples": 2},
        "rollout": {"request_timeout_s": 5.0, "heartbeat_timeout_s": 5.0, "ready_timeout_s": 10.0},
        "global_resource_planner": {"runtime_batch_collection_timeout_s": 10.0},
        "algorithm": {"step_timeout_s": 10.0, "normalize_advantage": False},
        "hardware": {"device": "cpu"},
    }
    config = OmegaConf.merge(OmegaConf.structured(LibraConfig), base, OmegaConf.create(options))
    made = OmegaConf.to_object(config)
    assert isinstance(made, LibraConfig)
    return made


def make_run(tmp_path: Path, instances: int = 1, **options: Any) -> RunDir:
    """A run directory as the launcher leaves it, and a tokenizer folder as its model."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    save_tokenizer(TOKENIZER, model, max_length=32)
    run = RunDir.create(tmp_path / "run")
    config = small_config(model, **options)
    run.config_yaml.write_text(yaml.safe_dump(OmegaConf.to_container(OmegaConf.structured(config))))
    placements = tuple(InstancePlacement(f"rollout_{i:03d}", 1, 1, 0) for i in range(instances))
    train = TrainLayout(gpus=1, nodes=1, gpus_per_node=1, tp=1, pp=1, cp=1, dp=1, micro_batch_size=8)
    rollout = RolloutLayout(instances, 1, instances, placements)
    run.write(run.plan_json, Plan("hetjob", "test", "cpu", train, rollout).to_dict())
    run.token_file.write_text(TOKEN + "\n")
    step = StepSpec("controller", "controller", 0, 0, 1, 1, 1, 1, 0)
    write_desired(run, DesiredState("run", (step,)))
    return run


@dataclass
class Request:
    """What a scripted server sees of one generation request; `number` counts from 0 over its life."""

    number: int
    prompts: list[str]
    n: int
    temperature: float
    max_tokens: int


@dataclass
class Reply:
    """What it shall do: wait, then fail with an HTTP status, or break the connection (status 0), or change the body."""

    delay_s: float = 0.0
    status: int = 200
    change: Callable[[dict[str, Any]], None] | None = None


def succeed(prompt: str, sample: int) -> str:
    """A policy whose first sample is always right and whose others are always wrong."""
    return str(int(prompt) + 1) if sample == 0 else "0"


@dataclass
class ScriptedServer:
    """Answers /v1/completions like our guarded vLLM, over real HTTP, from `policy` and `script`.

    Tokens get the version served when the request came, or half of them that and half the one served at its end.
    """

    name: str
    run: RunDir
    policy: Callable[[str, int], str] = succeed
    script: Callable[[Request], Reply] = lambda request: Reply()
    version: int = -1
    state: str = "ready"
    requests: list[Request] = field(default_factory=list)
    heartbeats: int = 0
    base_url: str = ""
    incarnation: int = 0
    is_dead: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def come_back(self) -> None:
        """As its own replacement, with the weights proved."""
        self.incarnation, self.is_dead = self.incarnation + 1, False
        self.register()

    async def start(self) -> web.AppRunner:
        self.stopping = asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.register()
        return runner

    def register(self) -> None:
        if self.is_dead:
            return
        self.heartbeats += 1
        status = InstanceStatus(
            instance=self.name,
            state=self.state,
            base_url=self.base_url,
            host="localhost",
            version=self.version,
            manifest_digest="d",
            heartbeat=self.heartbeats,
            agent_pid=1,
            server_pid=1,
            device="cpu",
            tp=1,
            incarnation=self.incarnation,
        )
        write_status(RunDir(self.run.root, self.run.run_id, self.run.attempt, self.name), status)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        if http.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        body = await http.json()
        assert body["logprobs"] == 0
        assert body["return_token_ids"] is True
        prompts = [TOKENIZER.decode(ids) for ids in body["prompt"]]
        request = Request(len(self.requests), prompts, body["n"], body["temperature"], body["max_tokens"])
        self.requests.append(request)
        version = self.version
        reply = self.script(request)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), reply.delay_s)
        if reply.status == 0 or self.is_dead:
            assert http.transport is not None
            http.transport.abort()
        if reply.status != 200:
            return web.Response(status=reply.status or 500, text="scripted failure")
        answer = self._answer(request, version)
        if reply.change is not None:
            reply.change(answer)
        return web.json_response(answer, headers={"x-libra-version": str(self.version)})

    def _answer(self, request: Request, version: int) -> dict[str, Any]:
        texts = [self.policy(prompt, sample) for prompt in request.prompts for sample in range(request.n)]
        return {"choices": [self._choice(index, text, version) for index, text in enumerate(texts)]}

    def _choice(self, index: int, text: str, version: int) -> dict[str, Any]:
        ids = [*TOKENIZER.encode(text, add_special_tokens=False).ids, EOS_ID]
        half = len(ids) // 2
        segments = [[version, half], [self.version, len(ids) - half]]
        return {
            "index": index,
            "finish_reason": "stop",
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.25] * len(ids)},
            "version_segments": [[version, len(ids)]] if version == self.version else segments,
        }


@dataclass
class SigningTrainer:
    """Consumes batches in order and writes what a trainer would write, without training, from step `start` on.

    `before_step(t)` runs between reading batch t and signing it; `silent_at` stops signing at that step.
    """

    run: RunDir
    total_steps: int
    sync_interval: int
    servers: list[ScriptedServer]
    before_step: Callable[[int], None] = lambda step: None
    silent_at: int = -1
    start: int = 0
    batches: list[tuple[Batch, BatchManifest]] = field(default_factory=list)
    on_disk: list[int] = field(default_factory=list)  # untrained batches at the time of each step
    stop: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def work(self) -> None:
        try:
            self.begin()
            for step in range(self.start, self.total_steps):
                self._step(step)
        except InterruptedError:
            return
        except BaseException as error:
            self.error = error
            raise

    def begin(self) -> None:
        self.run.write(self.run.start_json, {"step": self.start, "checkpoint": "", "load_s": 0.0})
        self._serve(self.start)

    def _step(self, step: int) -> None:
        found = wait_for(
            lambda: read_batch(self.run, step, own=True),
            deadline_s=WAIT_S,
            awaited=f"batch {step}",
            from_whom="the controller",
            check=self._check,
        )
        self.batches.append(found)
        self.on_disk.append(len(self.run.published_batches()) - step)
        self.before_step(step)
        if step == self.silent_at:
            raise InterruptedError
        seconds = {"wait_for_batch": 0.1, "grpo_update": 0.2}
        receipt: dict[str, Any] = {
            "step": step,
            "version": step + 1,
            "loss": 0.5,
            "grad_norm": 1.0,
            "learning_rate": 1e-3,
        }
        receipt |= {"tokens": found[1].tokens, "clip_fraction": 0.0, "seconds": seconds}
        receipt |= {"logprob_difference_max": 1e-6, "logprob_difference_mean": 1e-7}
        self.run.write(self.run.batch(step) / "trained.json", receipt)
        if (step + 1) % self.sync_interval == 0 or step + 1 == self.total_steps:
            self._serve(step + 1)

    def _serve(self, version: int) -> None:
        for server in self.servers:
            server.version = version
            server.register()  # an instance says so before it acknowledges
        record = {
            "version": version,
            "digest": "d",
            "refresh_s": 0.05,
            "publish_s": 0.01,
            "slowest": {},
            "instances": [],
        }
        self.run.write(self.run.refreshed_json(version), record)

    def _check(self) -> None:
        if self.stop.is_set():
            raise InterruptedError


@contextlib.contextmanager
def serving(servers: list[ScriptedServer]) -> Iterator[None]:
    """Run the servers, with heartbeats, in a thread of their own."""
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        runners = [await server.start() for server in servers]
        started.set()
        while not stop.is_set():
            for server in servers:
                server.register()
            await asyncio.sleep(0.02)
        for server in servers:
            server.stopping.set()
        for runner in runners:
            await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(WAIT_S)
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT_S)


@contextlib.contextmanager
def training(trainer: SigningTrainer) -> Iterator[None]:
    thread = threading.Thread(target=trainer.work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        trainer.stop.set()
        thread.join(WAIT_S)


def until(condition: Callable[[], bool]) -> None:
    """Block a scripted thread until something is true."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the awaited condition never came"
        time.sleep(0.002)
