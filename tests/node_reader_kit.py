"""What the tests of the agent's reader share: a reader, engines of its node, and readings that wait until they may go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from stages.rollout import node_reader
from stages.rollout.engine_weights import EngineWeights
from stages.rollout.node_reader import NodeReader
from stages.rundir import RunDir
from stages.weights.manifest import Manifest
from stages.weights.versions import read_version
from tests.engine_kit import EngineModel, checkpoint, engine, loaded, part_sums_on_the_host, start_folder
from traces.recorder import Recorder

LIMIT_S = 10.0


class GivenUpError(Exception):
    pass


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return start_folder(tmp_path / "start", checkpoint(0))


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> None:
    part_sums_on_the_host(monkeypatch)


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def agent(run: RunDir, start: Path) -> NodeReader:
    reader = NodeReader(run, "float32", Recorder(run.traces, "rollout", 0, 1, "rollout_000", enabled=False))
    reader.start_folder = start
    return reader


def reading(
    reader: NodeReader, manifest: Manifest, pause: Callable[[float], None] = lambda _: None, deadline_s: float = LIMIT_S
) -> AbstractContextManager[None]:
    return reader.reading(manifest.version, manifest.digest, deadline_s=deadline_s, pause=pause)


def an_engine(run: RunDir, start: Path, rank: int = 0, size: int = 1) -> tuple[EngineModel, EngineWeights]:
    model = loaded(EngineModel(rank, size), checkpoint(0))
    return model, engine(run, model, start)


class Held:
    """Readings of the agent that wait, each before its first piece, until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may_go_on = threading.Event(), threading.Event()

        def slow(run: RunDir, manifest: Manifest, **how: Any) -> Any:
            self.began.set()
            assert self.may_go_on.wait(LIMIT_S)
            return read_version(run, manifest, **how)

        monkeypatch.setattr(node_reader, "read_version", slow)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def give_up_a_reading(reader: NodeReader, manifest: Manifest, held: Held) -> None:
    """It goes on, between two pieces, until it may see that nobody wants it."""

    def ordered() -> None:
        with reading(reader, manifest):
            assert held.began.wait(LIMIT_S)
            raise GivenUpError

    with pytest.raises(GivenUpError):
        ordered()
