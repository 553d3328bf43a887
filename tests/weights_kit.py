"""What the tests of the weight exchange share: small runs, ranks as threads, answers of instances that do not exist."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from conf.schema import LibraConfig
from conf.sections import WeightsConfig
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.context import StageContext
from stages.rundir import RunDir
from stages.weights.apply import pending_request, write_loaded, write_nack, write_prepared
from stages.weights.instances import InstanceStatus, write_status
from stages.weights.manifest import Manifest, Probe
from stages.weights.publish import Publisher, publish
from stages.weights.ranks import RankGroup
from stages.weights.records import Loaded, Nack, Prepared, Proof
from stages.weights.tensors import LocalTensor
from traces.recorder import Recorder

Value = TypeVar("Value")

PROBE = Probe((5, 7, 11), (-1.25, -0.1))
INSTANCES = ("rollout_000", "rollout_001")
TOLERANCE = 1e-3


class ThreadRank:
    """One of several ranks that are threads."""

    def __init__(self, rank: int, size: int, slots: list[bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = size
        self._slots = slots
        self._barrier = barrier

    def gather(self, data: bytes) -> list[bytes]:
        self._slots[self.rank] = data
        self._barrier.wait()
        gathered = list(self._slots)
        self._barrier.wait()
        return gathered


def run_ranks(size: int, body: Callable[[RankGroup], Value]) -> list[Future[Value]]:
    """`body` on `size` ranks; the finished futures in rank order."""
    slots, barrier = [b""] * size, threading.Barrier(size, timeout=30)
    with ThreadPoolExecutor(size) as pool:
        return [pool.submit(body, ThreadRank(rank, size, slots, barrier)) for rank in range(size)]


def make_source(folder: Path) -> Path:
    """A model folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": "none"}')
    (folder / "README.md").write_text("not taken over")
    return folder


def make_publisher(run: RunDir, ranks: RankGroup | None = None, **options: Any) -> Publisher:
    """With a model folder beside the run; float32 unless told."""
    chosen = WeightsConfig(**{"dtype": "float32", **options})
    return Publisher(run, source_folder=make_source(run.root.parent / "source"), options=chosen, ranks=ranks)


def small_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)  # ranks that are threads would share torch's own
    shapes = {"embed": (6, 4), "layer.down": (4, 8), "layer.norm": (4,), "layer.up": (8, 4), "scale": ()}
    return {f"model.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def publish_full(
    run: RunDir,
    version: int,
    tensors: Mapping[str, torch.Tensor] | None = None,
    options: WeightsConfig | None = None,
    source: Path | None = None,
) -> Manifest:
    """Publish whole tensors from one rank."""
    chosen = small_tensors(version) if tensors is None else tensors
    return publish(
        run,
        version=version,
        step=version,
        tensors=[LocalTensor.whole(name, tensor) for name, tensor in chosen.items()],
        probe=PROBE,
        source_folder=source or make_source(run.root.parent / "source"),
        options=options or WeightsConfig(dtype="float32"),
    )


def make_context(run: RunDir, instances: Sequence[str] = INSTANCES) -> StageContext:
    """The context of a trainer with short deadlines."""
    config = LibraConfig()
    config.weights.refresh_timeout_s = 0.05
    config.weights.proof_tolerance = TOLERANCE
    config.rollout.ready_timeout_s = config.rollout.stop_timeout_s = 0.0
    placements = tuple(InstancePlacement(name, 1, 1, 0) for name in instances)
    plan = Plan(
        layout="single",
        layout_reason="test",
        device="cpu",
        train=TrainLayout(1, 1, 1, 1, 1, 1, 1, 1),
        rollout=RolloutLayout(len(instances), 1, len(instances), placements),
    )
    recorder = Recorder(run.traces, "trainer", 0, 1, "trainer", enabled=False)
    return StageContext(run, config, plan, "trainer", "trainer", 0, 1, 0, recorder)


def as_writer(run: RunDir, writer: str) -> RunDir:
    return replace(run, writer=writer)


@dataclass
class Answers:
    """Answers that a sound instance would give to the request for `manifest`, to be spoilt by tests."""

    run: RunDir
    manifest: Manifest

    def prepared(self, instance: str) -> Prepared:
        return Prepared(instance, self.manifest.version, self.manifest.digest, self.manifest.weight_bytes, 0.1, "node1")

    def loaded(self, instance: str, total_reload_s: float = 1.0) -> Loaded:
        return Loaded(
            instance=instance,
            version=self.manifest.version,
            digest=self.manifest.digest,
            method="inplace",
            strategy="parallel",
            lock_wait_s=0.0,
            process_stop_s=0.0,
            model_load_s=0.2,
            total_reload_s=total_reload_s,
            paused_s=0.05,
            prepare_s=0.1,
            proof=Proof(1e-5, TOLERANCE, len(PROBE.logprobs)),
            host="node1",
            server_response={"ok": True},
        )

    def write(self, instance: str, total_reload_s: float = 1.0) -> None:
        run = as_writer(self.run, instance)
        write_prepared(run, self.prepared(instance))
        write_loaded(run, self.loaded(instance, total_reload_s))


@dataclass
class Refuser:
    """An instance that goes on with version 2 and refuses, until it was asked again `gives_in_after` times; called while waiting."""

    answers: Answers
    instance: str
    gives_in_after: int = 99
    told: list[int] = field(default_factory=list)
    """The retries that it has answered."""

    def __call__(self) -> None:
        manifest = self.answers.manifest
        run = as_writer(self.answers.run, self.instance)
        request = pending_request(run, self.instance, manifest.version - 1)
        retry = -1 if request is None else request.retries.get(self.instance, 0)
        if retry < 0 or retry in self.told:
            return
        self.told.append(retry)
        if retry >= self.gives_in_after:
            self.answers.write(self.instance)
        else:
            nack = Nack(
                self.instance, manifest.version, manifest.digest, "prepare", "digest differs", 2, "model.embed", retry
            )
            write_nack(run, nack)


def make_status(instance: str, **changes: Any) -> InstanceStatus:
    status = InstanceStatus(
        instance=instance,
        state="ready",
        base_url="http://127.0.0.1:1",
        host="node1",
        version=-1,
        manifest_digest="",
        heartbeat=0,
        agent_pid=1,
        server_pid=2,
        device="cpu",
        tp=1,
    )
    return replace(status, **changes)


def register(run: RunDir, instance: str, **changes: Any) -> None:
    write_status(as_writer(run, instance), make_status(instance, **changes))
