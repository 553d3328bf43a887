"""What the trainer says of a version that it is writing is not believed, nor are bytes, before the manifest says so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rollout.engine_weights import EngineWeights
from stages.rollout.node_reader import NodeReader
from stages.rollout.read_ahead import _Parts
from stages.rundir import RunDir
from stages.weights.progress import Stretch
from stages.weights.publication import Publication
from stages.weights.publish import Publisher
from stages.weights.tensors import LocalTensor
from tests.engine_kit import DOWN, NORM, EngineModel, checkpoint, run, stage
from tests.read_ahead_kit import (
    LIMIT_S,
    agent,
    as_a_gpu_does,
    looked_ahead,
    publisher,
    read_again,
    served,
    start,
    take_over,
    written,
)

__all__ = ["agent", "as_a_gpu_does", "publisher", "read_again", "run", "served", "start"]

pytestmark = pytest.mark.usefixtures("as_a_gpu_does")

Line = list[Any]


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
    num_bytes = checkpoint(1)[DOWN].numel() * 4
    path.write_bytes(honest[: place.offset] + bytes(num_bytes) + honest[place.offset + num_bytes :])
    looked_ahead(agent)
    path.write_bytes(honest)
    manifest = publication.finish()

    assert take_over(agent, run, served, manifest) == (False, True)
    assert read_again == [DOWN]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no json",
        "[]",
        "null",
        '{"name": 1}',
        '["NORM", "../../token.safetensors", 0, 0, 8]',
        '["NORM", "/dev/zero.safetensors", 0, 0, 8]',
        r'["NORM", "model\u0000.safetensors", 0, 0, 8]',
        '["NORM", "missing.safetensors", 0, 0, 8]',
        '["NORM", "link.safetensors", 0, 0, 8]',
        '["NORM", "fifo.safetensors", 0, 0, 8]',
        '["NORM", "model.safetensors", 0, 0, 1000000]',
        '["NORM", "model.safetensors", 0, 1000000, 8]',
        '["NORM", "model.safetensors", 36893488147419103232, 0, 8]',
        '["NORM", "model.safetensors", -8, 0, 8]',
        '["NORM", "model.safetensors", 0, -8, 8]',
        '["NORM", "model.safetensors", 1e3, 0, 8]',
        '["NORM", "model.safetensors", true, 0, 8]',
        '["NORM", ["model.safetensors"], 0, 0, 8]',
        '["nobody", "model.safetensors", 0, 0, 8]',
        '[["NORM"], "model.safetensors", 0, 0, 8]',
        '["NORM", "model.safetensors", 8, 0, 32]',
        '["NORM", "model.safetensors", 8, 16, 8]',
        '["NORM", "model.safetensors", 0, 0, 0]',
        '["NORM", "model.safetensors", 0, 0, 1, 8]',
        '["NORM", "\\ud800.safetensors", 0, 0, 8]',
        '["NORM", ' + "[" * 20_000,
        "x" * 200_000,
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
    hints.write_text(line.replace("NORM", NORM) + "\n" + hints.read_text())
    looked_ahead(agent, len(checkpoint(0)) - 1)
    for name in ("link.safetensors", "fifo.safetensors"):
        (publication._path / name).unlink()

    manifest = publication.finish()

    assert take_over(agent, run, served, manifest) == (False, True)


def test_parts_that_were_read_to_each_other_s_place_are_read_again(
    run: RunDir,
    agent: NodeReader,
    publisher: Publisher,
    served: tuple[EngineModel, EngineWeights],
    read_again: list[str],
) -> None:
    down = checkpoint(1)[DOWN]
    halves = [LocalTensor.along(DOWN, down.shape, 0, row, down[row : row + 4]) for row in (0, 4)]
    publication = written(publisher, 1, {DOWN: halves})
    _rewrite_lines(publication, lambda line: [*line[:3], 192 - line[3], 192] if line[0] == DOWN else line)
    looked_ahead(agent, len(checkpoint(0)) + 1)

    assert take_over(agent, run, served, publication.finish()) == (False, True)
    assert read_again == [DOWN, DOWN]


def test_nothing_is_read_over_bytes_that_were_hashed(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    publication = written(publisher, 1)
    lines = _rewrite_lines(publication, lambda line: None if line[0] == NORM else line)
    looked_ahead(agent, len(lines) - 1)
    (norm,) = (line for line in lines if line[0] == NORM)
    place = publication._layout.tensors[DOWN]
    over = [[DOWN, place.file, place.offset + 8, 0, 64], [DOWN, place.file, place.offset + 8, 320, 64]]
    with next(publication._path.glob(".parts.*")).open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in [*over, norm]))
    looked_ahead(agent, len(lines))

    assert take_over(agent, run, served, publication.finish()) == (False, True)


@given(places=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=20))
@settings(max_examples=50, deadline=None)
def test_a_place_is_had_once_and_no_place_is_none(places: list[tuple[int, int]]) -> None:
    parts, had = _Parts(Path(), {NORM: torch.zeros(32, dtype=torch.uint8)}, {}), set[int]()
    for first, length in places:
        place = set(range(first, first + length))
        is_free = bool(place) and max(place) < 32 and not place & had

        assert parts.claim(Stretch(NORM, "model.safetensors", 0, first, length)) is is_free
        had |= place if is_free else set()


def _rewrite_lines(publication: Publication, rewrite: Callable[[Line], Line | None]) -> list[Line]:
    """The lines that were told; None leaves one out."""
    (hints,) = publication._path.glob(".parts.*")
    lines = [json.loads(line) for line in hints.read_text().splitlines()]
    rewritten = [line for line in map(rewrite, lines) if line is not None]
    hints.write_text("".join(json.dumps(line) + "\n" for line in rewritten))
    return lines


def _flip(path: Path, offset: int) -> None:
    flipped = bytearray(path.read_bytes())
    flipped[offset] ^= 1
    path.write_bytes(flipped)


def test_damage_that_was_read_ahead_is_refused_by_the_engine(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    publication = written(publisher, 1)
    place = publication._layout.tensors[DOWN]
    _flip(publication._path / place.file, place.offset)
    looked_ahead(agent)
    manifest = publication.finish()

    with (
        agent.reading(1, manifest.digest, deadline_s=LIMIT_S, pause=lambda _: None),
        pytest.raises(Exception, match=DOWN),
    ):
        stage(served[1], run, manifest)
