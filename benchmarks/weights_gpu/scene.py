"""A run directory in one folder, with the trainer's publisher and the instance that follows it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from benchmarks.weights_gpu.agent import INSTANCE
from benchmarks.weights_gpu.engine import Instance
from benchmarks.weights_gpu.model import Parameters
from conf.schema import LibraConfig
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.context import StageContext, open_context
from stages.files import read_json, remove_tree
from stages.rundir import RunDir
from stages.weights import spares
from stages.weights.collect import sweep_leftovers
from stages.weights.manifest import Manifest, Probe
from stages.weights.proof import probe_change_nats
from stages.weights.publish import Publisher, publish
from stages.weights.refresh import request_refresh
from traces.reader import find_files, load_file

RELOAD_TIMEOUT_S = 120.0
TOLERANCE_NATS = {"bfloat16": 0.25, "float32": 1e-3}
"""Random weights in 16 bits: rounding alone moves a log-prob by some hundredths, a step moves the probe by a whole nat and more."""


def rollout_config(
    device: str, dtype: str, place: Path, max_model_len: int, *, eager: bool, share: float
) -> LibraConfig:
    """`place` is where `publish_model` puts the model; `share` of the GPU's memory is for vLLM."""
    config = LibraConfig(
        model_path=str(_model_run(place) / "weights" / "v000000"), max_model_len=max_model_len, train_dtype=dtype
    )
    config.hardware.device = device
    config.hardware.gpus_per_node, config.hardware.cpus_per_node = 1, len(os.sched_getaffinity(0))
    config.weights.dtype = config.rollout.dtype = dtype
    config.weights.proof_tolerance = TOLERANCE_NATS[dtype]
    config.rollout.enforce_eager = eager
    config.rollout.gpu_memory_utilization = share
    config.rollout.kv_cache_bytes = 64e6
    config.rollout.max_num_seqs = 128
    return config


def make_run(root: Path, config: LibraConfig) -> RunDir:
    """A run directory as the launcher leaves it, with one instance, seen by the trainer."""
    run = RunDir.create(root)
    OmegaConf.save(OmegaConf.create(asdict(config)), run.config_yaml)
    run.token_file.touch(mode=0o600)
    run.token_file.write_text(secrets.token_hex(32), encoding="ascii")
    layouts = TrainLayout(1, 1, 1, 1, 1, 1, 1, 1), RolloutLayout(1, 1, 1, (InstancePlacement(INSTANCE, 1, 0, 0),))
    run.write(run.plan_json, Plan("single", "made up", config.hardware.device, *layouts).to_dict())
    return replace(run, writer="trainer")


def publish_model(place: Path, parameters: Parameters, config: LibraConfig) -> None:
    """The parameters as a HF folder, written by the product as version 0 of a run of its own; the rest is in `place`/source."""
    publish(
        RunDir.create(_model_run(place)),
        version=0,
        step=0,
        tensors=parameters.tensors(),
        probe=parameters.probe(),
        source_folder=place / "source",
        options=config.weights,
    )


def _model_run(place: Path) -> Path:
    return place / "model"


@dataclass
class Scene:
    """Versions are numbered from 1; `version` is the newest that was begun."""

    name: str
    config: LibraConfig
    context: StageContext
    parameters: Parameters
    publisher: Publisher
    instance: Instance
    version: int = 0
    _before: Probe | None = field(default=None, repr=False)

    @property
    def run(self) -> RunDir:
        return self.context.run

    def publish(self) -> tuple[Manifest, dict[str, Any]]:
        """Publish a changed model. Measured from the end of the change; "ended_s" is that moment."""
        self.version += 1
        self.parameters.step()
        ended_s = time.perf_counter()
        probe = self.parameters.probe()
        probed_s = time.perf_counter()
        publication = self.publisher.begin(self.version, self.version, self.parameters.tensors(), probe)
        begun_s = time.perf_counter()
        manifest = publication.finish()
        finished_s = time.perf_counter()
        report = publication.report
        moved = None if self._before is None else probe_change_nats(self._before, probe)
        self._before = probe
        return manifest, {
            "version": self.version,
            "bytes": manifest.weight_bytes,
            "ended_s": ended_s,
            "probe_s": probed_s - ended_s,
            "snapshot_s": begun_s - probed_s,
            "write_s": report.write_s,
            "publish_s": finished_s - probed_s,
            "extra_host_bytes": report.peak_extra_host_bytes,
            "probe_moved_nats": moved,
        }

    def refresh(self, method: str) -> dict[str, Any]:
        """Publish and let the instance serve it by `method`; what trainer, agent and server measured."""
        manifest, measured = self.publish()
        config = replace(self.config, rollout_weight_reload_method=method)
        result = request_refresh(
            replace(self.context, config=config), manifest, (INSTANCE,), measured["publish_s"], self.instance.check
        )
        measured["total_s"] = time.perf_counter() - measured.pop("ended_s")
        answer = read_json(self.run.ack_json(self.version, INSTANCE, "loaded")) or {}
        names = ("prepare_s", "process_stop_s", "model_load_s", "paused_s", "total_reload_s")
        response = answer["server_response"]
        return {
            **measured,
            "refresh_s": result.refresh_s,
            **{name: answer[name] for name in names},
            "proof_nats": answer["proof"]["max_difference"],
            "rest_s": measured["total_s"]
            - sum(measured[name] for name in ("probe_s", "publish_s"))
            - sum(answer[name] for name in ("prepare_s", "paused_s")),
            "server": _numbers(response) | self._spans(),
            "server_says": _texts(response),
        }

    def vllm_reload(self) -> dict[str, Any]:
        """Publish, and let vLLM reload the folder in its own way. Raises ValueError when it then holds other weights."""
        manifest, measured = self.publish()
        asked_s = time.perf_counter()
        folder = self.run.weights_version(self.version)
        answer = self.instance.vllm_reload(folder, manifest.probe.token_ids, RELOAD_TIMEOUT_S)
        now_s = time.perf_counter()
        difference = probe_change_nats(Probe(manifest.probe.token_ids, tuple(answer.pop("logprobs"))), manifest.probe)
        if not difference <= self.config.weights.proof_tolerance:
            raise ValueError(f"after vLLM's reload of {folder} the probe differs by {difference:.3g} nats")
        measured["total_s"] = now_s - measured.pop("ended_s")
        seconds = {"refresh_s": now_s - asked_s, "prepare_s": 0.0, "paused_s": answer["paused_s"]}
        return {**measured, **seconds, "proof_nats": difference, "server": answer, "server_says": {}}

    def _spans(self) -> dict[str, float]:
        """Seconds of every part of this version that agent and server recorded, by name; several of one name add up."""
        found: dict[str, float] = {}
        for prefix, ending in {"span": f".{INSTANCE}.server.jsonl", "agent": f".{INSTANCE}.jsonl"}.items():
            (path,) = (path for path in find_files(self.run.traces) if path.name.endswith(ending))
            for span in load_file(path).spans:
                if span.version == self.version and not span.unfinished:
                    name = f"{prefix}.{span.phase}"
                    found[name] = found.get(name, 0.0) + (span.end_ns - span.start_ns) / 1e9
        return found

    def clean(self) -> None:
        """As a collection does, with all versions but that which the server was started from, which it may read again."""
        status = self.instance.status
        kept = status.leases if status else ()
        for version in self.run.published_versions():
            folder = self.run.weights_version(version)
            if version not in kept and not spares.keep(self.run, folder):
                remove_tree(folder)
        sweep_leftovers(self.run, self.run.weights)


@contextmanager
def scene(
    folder: Path, name: str, config: LibraConfig, parameters: Parameters, device: torch.device
) -> Iterator[Scene]:
    """A new run in `folder`, which exists and is empty; at the end its processes are gone."""
    run = make_run(folder / "run", config)
    instance = Instance(run, folder)
    with open_context("trainer", run.root, name="trainer") as context:
        publisher = Publisher(run, source_folder=Path(config.model_path), options=config.weights, device=device)
        try:
            yield Scene(name, config, context, parameters, publisher, instance)
        finally:
            instance.stop()
            publisher.close()


def _numbers(value: Any, prefix: str = "") -> dict[str, float]:
    """Numbers in the answer of the server, under dotted names, whatever it reports."""
    if isinstance(value, bool) or not isinstance(value, dict | list | int | float):
        return {}
    if isinstance(value, int | float):
        return {prefix: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, float] = {}
    for key, inner in items:
        found |= _numbers(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


def _texts(response: dict[str, Any]) -> dict[str, Any]:
    """How each worker got the weights, and why not in a faster way."""
    workers = response.get("workers", [])
    names = ("method", "why_reload", "read_here")
    return {f"{rank}.{name}": worker[name] for rank, worker in enumerate(workers) for name in names if name in worker}
