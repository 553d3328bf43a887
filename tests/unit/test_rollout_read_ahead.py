"""The agent reads what the trainer has not published yet, and believes nothing of it before the manifest says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.files import wait_for
from stages.rollout import read_ahead
from stages.rollout.engine_weights import EngineWeights
from stages.rollout.node_reader import NodeReader
from stages.rundir import RunDir
from stages.weights import reader
from stages.weights.manifest import Manifest
from stages.weights.progress import ProgressWriter
from stages.weights.publication import Publication
from stages.weights.publish import Publisher
from stages.weights.tensors import LocalTensor
from tests.engine_kit import (
    DOWN,
    EMBED,
    NORM,
    EngineModel,
    checkpoint,
    engine,
    loaded,
    part_sums_on_the_host,
    run,
    stage,
    start_folder,
)
from tests.weights_kit import PROBE, make_publisher
from traces.recorder import Recorder

__all__ = ["run"]

LIMIT_S = 10.0


@pytest.fixture(autouse=True)
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


def written(publisher: Publisher, version: int) -> Publication:
    """All bytes are in the files, and the version has no name yet."""
    owned = [LocalTensor.whole(name, tensor) for name, tensor in checkpoint(version).items()]
    publication = publisher.begin(version, version, owned, PROBE)
    awaited("the writers", lambda: all(worker.done() for worker in publication._writer._workers))
    return publication


def awaited(what: str, look: Callable[[], Any]) -> Any:
    return wait_for(lambda: look() or None, deadline_s=LIMIT_S, awaited=what, from_whom="a thread")


def looked_ahead(agent: NodeReader, parts: int = len(checkpoint(0)), newer_than: int = 0) -> None:
    """It has read so many parts."""
    agent.look_ahead(newer_than)
    awaited("the parts", lambda: agent._ahead is not None and len(agent._ahead._have) >= parts)


def ended(agent: NodeReader) -> None:
    awaited("the end", lambda: agent._ahead is None or not agent._ahead.is_alive)


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


def test_what_was_read_ahead_is_not_read_again(
    run: RunDir,
    agent: NodeReader,
    publisher: Publisher,
    served: tuple[EngineModel, EngineWeights],
    read_again: list[str],
) -> None:
    for version in (1, 2, 3):
        publication = written(publisher, version)
        looked_ahead(agent)
        manifest = publication.finish()

        assert take_over(agent, run, served, manifest) == (False, True)

    assert read_again == []


def test_a_version_is_whole_in_the_memory_before_anybody_asks_for_it(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    publication = written(publisher, 1)
    looked_ahead(agent)
    manifest = publication.finish()
    ended(agent)

    assert not stage(served[1], run, manifest).read_here


def test_an_order_that_comes_while_it_is_completed_is_given_at_once(
    run: RunDir,
    agent: NodeReader,
    publisher: Publisher,
    served: tuple[EngineModel, EngineWeights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_pause(_: float) -> None:
        raise AssertionError("it waited before the order was given")

    publication = written(publisher, 1)
    looked_ahead(agent)
    manifest = publication.finish()

    with agent.reading(1, manifest.digest, deadline_s=LIMIT_S, pause=no_pause):
        assert not stage(served[1], run, manifest).read_here


# ---- nothing is believed ----------------------------------------------------------------------------------------------


def test_bytes_that_were_read_too_early_are_read_again(
    run: RunDir,
    agent: NodeReader,
    publisher: Publisher,
    served: tuple[EngineModel, EngineWeights],
    read_again: list[str],
) -> None:
    publication = written(publisher, 1)
    place = publication._layout.tensors[DOWN]
    path = publication._path / place.file
    honest = path.read_bytes()
    path.write_bytes(honest[: place.offset] + bytes(len(honest) - place.offset))
    looked_ahead(agent)
    path.write_bytes(honest)
    manifest = publication.finish()

    assert take_over(agent, run, served, manifest) == (False, True)
    assert DOWN in read_again
    assert EMBED not in read_again or manifest.tensors[EMBED].offset > manifest.tensors[DOWN].offset


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no json",
        "[]",
        "null",
        '{"name": 1}',
        '["NORM", [0], "../../token.safetensors", 0, 0, 8]',
        '["NORM", [0], "/dev/zero.safetensors", 0, 0, 8]',
        '["NORM", [0], "missing.safetensors", 0, 0, 8]',
        '["NORM", [0], "link.safetensors", 0, 0, 8]',
        '["NORM", [0], "fifo.safetensors", 0, 0, 8]',
        '["NORM", [0], "model.safetensors", 0, 0, 1000000]',
        '["NORM", [0], "model.safetensors", 0, 1000000, 8]',
        '["NORM", [0], "model.safetensors", -8, 0, 8]',
        '["NORM", [0], "model.safetensors", 0, -8, 8]',
        '["NORM", [0], "model.safetensors", 1e3, 0, 8]',
        '["NORM", ["0"], "model.safetensors", 0, 0, 8]',
        '["NORM", [[]], "model.safetensors", 0, 0, 8]',
        '["NORM", 0, "model.safetensors", 0, 0, 8]',
        '["nobody", [0], "model.safetensors", 0, 0, 8]',
        '[["NORM"], [0], "model.safetensors", 0, 0, 8]',
        '["NORM", [0], "model.safetensors", 8, 0, 32]',
    ],
)
def test_a_line_that_is_wrong_changes_nothing(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights], line: str
) -> None:
    publication = written(publisher, 1)
    (run.root / "token.safetensors").write_bytes(bytes(8))
    (publication._path / "link.safetensors").symlink_to(run.root / "token.safetensors")
    os.mkfifo(publication._path / "fifo.safetensors")
    (hints,) = publication._path.glob(".parts.*")
    hints.write_text(hints.read_text() + line.replace("NORM", NORM) + "\n" + hints.read_text())
    looked_ahead(agent)
    for name in ("link.safetensors", "fifo.safetensors"):
        (publication._path / name).unlink()

    manifest = publication.finish()

    assert take_over(agent, run, served, manifest) == (False, True)


def test_damage_after_the_reading_harms_nobody_and_damage_before_it_is_refused_by_the_engine(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    publication = written(publisher, 1)
    path = publication._path / publication._layout.tensors[DOWN].file
    flipped = bytearray(path.read_bytes())
    flipped[publication._layout.tensors[DOWN].offset] ^= 1
    path.write_bytes(flipped)
    looked_ahead(agent)
    manifest = publication.finish()

    with (
        agent.reading(1, manifest.digest, deadline_s=LIMIT_S, pause=lambda _: None),
        pytest.raises(Exception, match=DOWN),
    ):
        stage(served[1], run, manifest)


# ---- ends -------------------------------------------------------------------------------------------------------------


def test_a_publication_that_is_given_up_leaves_the_memory_free_and_without_a_name(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    with make_publisher(run) as failing:
        publication = written(failing, 1)
        looked_ahead(agent)
        publication.close()
    ended(agent)

    assert served[1].staging._segment is not None
    assert served[1].staging._segment.name() == ""
    assert take_over(agent, run, served, written(publisher, 2).finish()) == (False, True)


def test_a_trainer_that_finishes_no_part_for_long_does_not_keep_the_memory(
    run: RunDir,
    agent: NodeReader,
    publisher: Publisher,
    served: tuple[EngineModel, EngineWeights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_ahead, "_PATIENCE_S", 0.05)
    publication = written(publisher, 1)
    looked_ahead(agent)

    ended(agent)

    agent.look_ahead(0)  # not once more: it is the same folder
    assert not agent._ahead or not agent._ahead.is_alive
    assert take_over(agent, run, served, publication.finish()) == (False, True)


def test_a_newer_version_that_is_asked_for_ends_the_reading_of_an_older_one(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    newer = written(publisher, 2).finish()
    stuck = run.weights / ".v000001.tmp-0-0123abcd"
    stuck.mkdir()
    ProgressWriter(stuck, 0).tell()  # of a trainer that goes no further
    agent.look_ahead(0)
    assert agent._ahead is not None

    assert take_over(agent, run, served, newer) == (False, True)
    assert not agent._ahead.is_alive


def test_memory_that_an_engine_still_needs_is_left_to_it(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    first = written(publisher, 1).finish()
    held = stage(served[1], run, first)
    publication = written(publisher, 2)

    agent.look_ahead(1)
    ended(agent)

    assert served[1].swap(held)["fault"] == ""
    served[1].staging.release()
    assert take_over(agent, run, served, publication.finish()) == (False, True)


def test_an_agent_that_leaves_ends_its_reading(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: Any
) -> None:
    publication = written(publisher, 1)
    looked_ahead(agent)

    agent.close()

    assert agent._ahead is not None
    assert not agent._ahead.is_alive
    assert agent._joined is None
    publication.finish()
