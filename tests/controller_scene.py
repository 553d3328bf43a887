"""One run of the controller with a scripted server and a signing trainer around it."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.context import StageContext, open_context
from stages.controller import stage
from stages.desired import DesiredState, StepSpec, write_desired
from stages.rundir import RunDir
from tests.controller_kit import Request, ScriptedServer, SigningTrainer, make_run, serving, training


@dataclass
class Scene:
    """One run with everything around the controller."""

    run: RunDir
    servers: list[ScriptedServer]
    trainer: SigningTrainer
    stopped_s: float = 0.0

    def play(self) -> dict[str, Any]:
        with serving(self.servers), training(self.trainer), self.context() as context:
            result = stage.run(context)
        assert self.trainer.error is None
        return result

    def context(self) -> AbstractContextManager[StageContext]:
        return open_context("controller", self.run.root, name="controller")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.metrics_jsonl.read_text().splitlines()]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "step" in line]

    def training_requests(self) -> list[Request]:
        """Without those of the evaluation, whose prompts start with 00."""
        requests = [request for server in self.servers for request in server.requests]
        return [request for request in requests if not request.prompts[0].startswith("00")]


def next_attempt(played: Scene, start: int) -> Scene:
    """What a supervisor does for the next attempt: fence the old one, new servers, a trainer that starts from step `start`."""
    played.run.start_attempt(played.run.attempt + 1)
    run = RunDir.open(played.run.root, writer="launcher")
    write_desired(run, DesiredState("run", (StepSpec("controller", "controller", 0, 0, 1, 1, 1, 1, 0),)))
    servers = [ScriptedServer(server.name, run, policy=server.policy) for server in played.servers]
    before = played.trainer
    writer = RunDir(run.root, run.run_id, run.attempt, "trainer")
    trainer = SigningTrainer(writer, before.total_steps, before.sync_interval, servers, start=start)
    return Scene(run, servers, trainer)


def scene(tmp_path: Path, instances: int = 1, **options: Any) -> Scene:
    run = make_run(tmp_path, instances, **options)
    with open_context("controller", run.root, name="controller") as context:
        config = context.config
    servers = [ScriptedServer(f"rollout_{i:03d}", run) for i in range(instances)]
    writer = RunDir(run.root, run.run_id, run.attempt, "trainer")
    return Scene(run, servers, SigningTrainer(writer, config.total_steps, config.sync_interval, servers))


def staleness_of(scene: Scene) -> list[int]:
    """Of the oldest token of every batch, counted from the batch files."""
    return [step - batch.oldest_version for step, (batch, _) in enumerate(scene.trainer.batches)]
