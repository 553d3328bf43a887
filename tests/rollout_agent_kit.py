"""What the tests of the agent share: a run with one instance, its server replaced by `tests.fake_rollout_server`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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
from stages.rollout.orphans import marked_pids
from stages.rollout.server_process import ServerProcess
from stages.rollout.stage import run
from stages.rundir import RunDir
from stages.weights.records import RefreshRequest
from traces.recorder import Recorder

NAME = "rollout_000"

pool = ThreadPoolExecutor(4)
beside: list[Future[None]] = []


@contextmanager
def fake_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServerProcess]]:
    """Every server started inside is the stand-in; whatever is left of one afterwards is a failure."""
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


def make_context(folder: Path) -> StageContext:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    made = RunDir.create(folder / "run")
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


def live_until(context: StageContext, body: Callable[[], None], stage: Callable[[StageContext], object] = run) -> None:
    """The whole life of an instance: `body` happens once it is ready, then it is asked to stop, and does."""

    def last() -> None:
        body()
        context.stop.set()

    when_ready(context, last)
    with pytest.raises(StoppedError):
        stage(context)


def request(context: StageContext, version: int, *, is_visible: bool = True, **changes: Any) -> None:
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
    asked = replace(wanted, **changes)
    trainer = replace(context.run, writer="trainer")
    if is_visible and version not in trainer.published_versions():
        with trainer.publishing(trainer.weights_version(version)) as publication:
            publication.commit(
                {"digest": asked.digest}
            )  # all that the agent looks at; the stand-in for the server reads nothing
    trainer.write(context.run.request_json(version), asked.to_record())


def ack(context: StageContext, version: int, phase: str) -> dict[str, Any]:
    path = context.run.ack_json(version, NAME, phase)
    found: dict[str, Any] = awaited(f"{phase} of version {version}", lambda: read_json(path))
    return found
