"""Attempts of a trainer whose ranks are real processes, with an instance and a controller played by the test."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.batches import adopt_batch, write_batch
from stages.files import wait_for
from stages.rundir import RunDir
from stages.stopping import StopRequest, write_stop_request
from stages.weights import apply, reader
from stages.weights.records import Loaded, Prepared, Proof
from tests.checkpoint_kit import INSTANCE, random_batch
from tests.weights_kit import as_writer

PROJECT = Path(__file__).parents[1]
WAIT_S = 60.0


class Ranks:
    """Forks trainer ranks on demand (tests/resume_worker.py)."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.resume_worker"],
            cwd=PROJECT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, run: RunDir, ranks: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"run": str(run.root), "ranks": ranks}) + "\n")
        self.process.stdin.flush()

    def results(self) -> list[Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], "the ranks did not end"
        answer = json.loads(self.process.stdout.readline())
        results: list[Any] = answer["results"]
        return results

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Attempt:
    """One attempt of `run`, and what its instance was asked to serve. `deaf_to` is a version that it does not answer."""

    run: RunDir
    deaf_to: int = -1
    served: list[int] = field(default_factory=list)

    @property
    def log(self) -> str:
        return (self.run.logs / "ranks.log").read_text()

    def write_batches(self, steps: range) -> None:
        """What the controller does: takes over what is there, makes the rest."""
        for step in steps:
            batch = random_batch(step)
            controller = as_writer(self.run, "controller")
            if adopt_batch(controller, step, batch.group_ids.tolist()) is None:
                write_batch(controller, step, batch)

    def wait_trained(self, step: int) -> None:
        path = self.run.batch(step) / "trained.json"
        wait_for(lambda: self.run.read(path), deadline_s=WAIT_S, awaited=str(path), from_whom="the trainer")

    def wait_requested(self, version: int) -> None:
        path = self.run.request_json(version)
        wait_for(lambda: self.run.read(path), deadline_s=WAIT_S, awaited=str(path), from_whom="the trainer")

    def ask_to_stop(self) -> None:
        write_stop_request(as_writer(self.run, "supervisor"), StopRequest("checkpoint", "time limit", 30.0))

    def digest(self, version: int) -> str:
        """Of every byte of a published version, its probe included."""
        return reader.load_manifest(self.run, version).digest


@contextmanager
def answering(attempt: Attempt) -> Iterator[None]:
    """Play the instance: acknowledge every request of this attempt, without loading anything."""
    stop = threading.Event()

    def answer_all() -> None:
        agent, handled = as_writer(attempt.run, INSTANCE), -1
        while not stop.wait(0.005):
            request = apply.pending_request(agent, INSTANCE, handled)
            if request is not None and request.version != attempt.deaf_to:
                answer(agent, request.version)
                handled = request.version
                attempt.served.append(handled)

    thread = threading.Thread(target=answer_all, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT_S)


def answer(agent: RunDir, version: int) -> None:
    manifest = reader.load_manifest(agent, version)
    apply.write_prepared(agent, Prepared(INSTANCE, version, manifest.digest, manifest.weight_bytes, 0.0, "test"))
    names = ("lock_wait_s", "process_stop_s", "model_load_s", "total_reload_s", "paused_s", "prepare_s")
    times: dict[str, Any] = dict.fromkeys(names, 0.0)
    loaded = Loaded(
        instance=INSTANCE,
        version=version,
        digest=manifest.digest,
        method="inplace",
        strategy="parallel",
        proof=Proof(0.0, 0.0, len(manifest.probe.logprobs)),
        host="test",
        server_response={},
        **times,
    )
    apply.write_loaded(agent, loaded)


def next_attempt(run: RunDir) -> RunDir:
    """One that nobody has had: ranks of one attempt started twice could meet at the first start's address."""
    run.start_attempt(run.newest_attempt() + 1)
    return RunDir.open(run.root, writer="test")


def trained_steps(run: RunDir) -> list[int]:
    """Steps whose receipts are of this attempt."""
    steps = sorted(run.published_batches())
    return [step for step in steps if run.read(run.batch(step) / "trained.json") is not None]
