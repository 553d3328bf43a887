"""What the tests of files that are written over share: a publisher that keeps them on any filesystem, and versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stages.context import StageContext
from stages.rundir import RunDir
from stages.weights.collect import collect
from stages.weights.manifest import Manifest
from stages.weights.publish import Publisher
from stages.weights.reader import load_manifest, read_verified, verify
from stages.weights.tensors import LocalTensor
from tests.weights_kit import PROBE, as_writer, make_context, make_publisher, small_tensors

FILE = "model.safetensors"


@pytest.fixture(autouse=True, params=[False, True], ids=["written", "mapped"])
def on_any_filesystem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Do copies end in mapped files, as they do in memory?"""
    monkeypatch.setattr("stages.weights.spares.is_quicker_written_over", lambda folder: True)
    monkeypatch.setattr("stages.weights.publish.lies_in_memory", lambda folder: request.param)
    return bool(request.param)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), "trainer")


@pytest.fixture
def context(run: RunDir) -> StageContext:
    return make_context(run)


@pytest.fixture
def publisher(run: RunDir) -> Iterator[Publisher]:
    with make_publisher(run) as made:
        yield made


def publish(publisher: Publisher, version: int, tensors: dict[str, torch.Tensor] | None = None) -> Manifest:
    chosen = small_tensors(version) if tensors is None else tensors
    whole = [LocalTensor.whole(name, tensor) for name, tensor in chosen.items()]
    return publisher.begin(version, version, whole, PROBE).finish()


def with_spare(publisher: Publisher, tensors: Callable[[int], dict[str, torch.Tensor]] = small_tensors) -> Path:
    """Versions 1 to 3, of which the first is collected: its files are kept. The file of version 1, as it was called."""
    for version in (1, 2, 3):
        publish(publisher, version, tensors(version))
    assert collect(make_context(publisher.run)).versions == (1,)
    return publisher.run.weights_version(1) / FILE


def inode(run: RunDir, version: int) -> int:
    return os.stat(run.weights_version(version) / FILE).st_ino


def spare_names(run: RunDir) -> list[str]:
    return [name for name in os.listdir(run.weights) if ".spare-" in name]


def assert_published(run: RunDir, version: int, tensors: dict[str, torch.Tensor]) -> None:
    manifest = load_manifest(run, version)
    verify(run, manifest)
    read = read_verified(run, manifest)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
