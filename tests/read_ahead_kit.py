"""What the tests of reading ahead share: an agent, an engine, and versions that have all their bytes and no name yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.files import wait_for
from stages.rollout.engine_weights import EngineWeights
from stages.rollout.node_reader import NodeReader
from stages.rundir import RunDir
from stages.weights import reader
from stages.weights.manifest import Manifest
from stages.weights.publication import Publication
from stages.weights.publish import Publisher
from stages.weights.tensors import LocalTensor
from tests.engine_kit import (
    NORM,
    EngineModel,
    checkpoint,
    engine,
    loaded,
    part_sums_on_the_host,
    stage,
    start_folder,
)
from tests.weights_kit import PROBE, make_publisher
from traces.recorder import Recorder

LIMIT_S = 10.0


@pytest.fixture
def as_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    part_sums_on_the_host(monkeypatch)
    monkeypatch.setattr(Publisher, "tells_progress", True)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return start_folder(tmp_path / "start", checkpoint(0))


@pytest.fixture
def agent(run: RunDir, start: Path) -> Iterator[NodeReader]:
    recorder = Recorder(run.traces, "rollout", 0, 1, "rollout_000", enabled=False)
    made = NodeReader(run, "float32", recorder)
    made.start_folder = start
    yield made
    made.close()


@pytest.fixture
def publisher(run: RunDir) -> Iterator[Publisher]:
    with make_publisher(run) as made:
        yield made


@pytest.fixture
def served(run: RunDir, start: Path) -> tuple[EngineModel, EngineWeights]:
    model = loaded(EngineModel(), checkpoint(0))
    return model, engine(run, model, start)


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of tensors, one for each piece that is read of a published version."""
    names: list[str] = []
    honest = reader._read_piece

    def read_piece(fd: int, piece: Any, *what: Any) -> None:
        names.append(piece.name)
        honest(fd, piece, *what)

    monkeypatch.setattr(reader, "_read_piece", read_piece)
    return names


def written(publisher: Publisher, version: int, slices: Mapping[str, list[LocalTensor]] | None = None) -> Publication:
    """All bytes are in the files, and the version has no name yet. `slices` are those of tensors that are not owned as a whole."""
    own = slices or {}
    tensors = checkpoint(version).items()
    owned = [local for name, tensor in tensors for local in own.get(name) or [LocalTensor.whole(name, tensor)]]
    publication = publisher.begin(version, version, owned, PROBE)
    awaited("the writers", lambda: all(worker.done() for worker in publication._writer._workers))
    return publication


def awaited(what: str, look: Callable[[], Any]) -> Any:
    return wait_for(lambda: look() or None, deadline_s=LIMIT_S, awaited=what, from_whom="a thread")


def looked_ahead(agent: NodeReader, parts: int = len(checkpoint(0)), newer_than: int = 0) -> None:
    """It has read so many parts."""
    agent.look_ahead(newer_than)
    awaited("the parts", lambda: agent._ahead is not None and len(agent._ahead.digests) >= parts)


def ended(agent: NodeReader) -> None:
    awaited("the end", lambda: agent._ahead is None or agent._ahead.over.is_set())


def take_over(
    agent: NodeReader, run: RunDir, served: tuple[EngineModel, EngineWeights], manifest: Manifest
) -> tuple[bool, bool]:
    """(read by the engine itself, the engine holds the version afterwards)."""
    model, weights = served
    with agent.reading(manifest.version, manifest.digest, deadline_s=LIMIT_S, pause=lambda _: None):
        staged = stage(weights, run, manifest)
    assert weights.swap(staged)["fault"] == ""
    weights.staging.release()
    return staged.read_here, torch.equal(model.norm, checkpoint(manifest.version)[NORM])
