"""The agent reads a version for the engines of its node, which judge it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.sections import WeightsConfig
from stages.rollout import memory_folder, node_reader
from stages.rollout.engine_weights import StagedVersion
from stages.rollout.memory_folder import leave_memory_folder
from stages.rundir import RunDir
from stages.weights.errors import DigestMismatchError
from stages.weights.manifest import Manifest
from stages.weights.publish import Publisher
from stages.weights.tensors import LocalTensor
from stages.weights.versions import read_version
from tests.engine_kit import NORM, checkpoint, publish_version, run, stage
from tests.node_reader_kit import LIMIT_S, Held, agent, an_engine, beside, held, reading, start, sums
from tests.weights_kit import PROBE, make_source

__all__ = ["beside", "held", "run", "start", "sums"]


def _cut_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"cut")


def _cut_the_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize("size", [1, 2])
def test_what_the_agent_has_read_goes_into_every_engine_of_the_node(
    run: RunDir, start: Path, sums: None, size: int
) -> None:
    manifest, reader = publish_version(run, 1), agent(run, start)
    engines = [an_engine(run, start, rank, size) for rank in range(size)]

    with reading(reader, manifest):
        staged = [stage(weights, run, manifest) for _, weights in engines]

    for (model, weights), version in zip(engines, staged, strict=True):
        report = weights.swap(version)
        assert (report["fault"], report["read_here"]) == ("", False)
        assert torch.equal(model.norm, checkpoint(1)[NORM])


def test_an_engine_that_is_ordered_while_the_agent_reads_waits_for_it(
    run: RunDir, start: Path, sums: None, held: Held, beside: ThreadPoolExecutor
) -> None:
    manifest, reader = publish_version(run, 1), agent(run, start)
    _, weights = an_engine(run, start)
    looked = threading.Event()

    with reading(reader, manifest):
        waiting: Future[StagedVersion] = beside.submit(
            weights.stage, run, manifest, deadline_s=LIMIT_S, check=looked.set
        )
        assert looked.wait(LIMIT_S)
        held.may_go_on.set()
        staged = waiting.result(LIMIT_S)

    assert not staged.read_here
    assert weights.swap(staged)["fault"] == ""


def test_of_two_agents_on_a_node_one_reads(
    run: RunDir, start: Path, sums: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, readers = publish_version(run, 1), [agent(run, start) for _ in range(2)]
    _, weights = an_engine(run, start)
    reads: list[int] = []

    def counted(run: RunDir, manifest: Manifest, **how: Any) -> Any:
        reads.append(manifest.version)
        return read_version(run, manifest, **how)

    monkeypatch.setattr(node_reader, "read_version", counted)

    with reading(readers[0], manifest), reading(readers[1], manifest):
        staged = stage(weights, run, manifest)

    assert reads == [1]
    assert not staged.read_here


def test_versions_follow_each_other(run: RunDir, start: Path, sums: None) -> None:
    reader = agent(run, start)
    model, weights = an_engine(run, start)

    for version in (1, 2, 3):
        manifest = publish_version(run, version)
        with reading(reader, manifest):
            staged = stage(weights, run, manifest)
        assert (weights.swap(staged)["fault"], staged.read_here) == ("", False)
        weights.staging.release()
        assert torch.equal(model.norm, checkpoint(version)[NORM])


def test_bytes_stay_until_the_engine_has_answered_and_no_longer(run: RunDir, start: Path, sums: None) -> None:
    first, second, reader = publish_version(run, 1), publish_version(run, 2), agent(run, start)
    _, weights = an_engine(run, start)

    with reading(reader, first), pytest.raises(TimeoutError):
        weights.stage(run, second, deadline_s=0.05, check=lambda: None)
    with reading(reader, second):
        assert not stage(weights, run, second).read_here


# ---- what is left to the engine ---------------------------------------------------------------------------------------


def test_without_sums_of_the_trainer_the_engine_reads_and_sums_up(run: RunDir, start: Path) -> None:
    manifest, reader = publish_version(run, 1), agent(run, start)
    _, weights = an_engine(run, start)

    with reading(reader, manifest):
        assert stage(weights, run, manifest).read_here


def test_a_delta_is_applied_by_the_engine(run: RunDir, start: Path, sums: None) -> None:
    reader, options = agent(run, start), WeightsConfig(dtype="float32", delta="sparse")
    _, weights = an_engine(run, start)
    publisher = Publisher(run, source_folder=make_source(run.root.parent / "source"), options=options)
    tensors = checkpoint(1)
    manifests = []
    for version in (1, 2):
        tensors[NORM][0] += 1
        owned = [LocalTensor.whole(name, tensor) for name, tensor in tensors.items()]
        manifests.append(publisher.begin(version, version, owned, PROBE).finish())
    assert manifests[1].delta is not None

    for manifest in manifests:
        with reading(reader, manifest):
            staged = stage(weights, run, manifest)
        assert weights.swap(staged)["fault"] == ""
        assert staged.read_here == (manifest.version == 2)
        weights.staging.release()
    publisher.close()


def test_an_engine_with_memory_of_its_own_reads_itself_and_nothing_is_made_for_it(
    run: RunDir, start: Path, sums: None, capsys: pytest.CaptureFixture[str]
) -> None:
    manifests, reader = [publish_version(run, version) for version in (1, 2)], agent(run, start)

    for manifest in manifests:
        with reading(reader, manifest), reader._turn:
            pass  # it has given up

    said = capsys.readouterr().out
    assert said.count("was not read ahead of the engine") == 1
    assert "the server's log says why" in said
    reader.close()
    leave_memory_folder(run.run_id)
    assert os.listdir(memory_folder._SHARED_MEMORY) == []


def test_damaged_bytes_are_left_without_a_name_and_refused_by_the_engine(
    run: RunDir, start: Path, sums: None, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, reader = publish_version(run, 1), agent(run, start)
    _, weights = an_engine(run, start)
    path = run.weights_version(1) / "model.safetensors"
    flipped = bytearray(path.read_bytes())
    flipped[-1] ^= 1
    path.write_bytes(flipped)

    with reading(reader, manifest), pytest.raises(DigestMismatchError):
        stage(weights, run, manifest)

    assert "version 1 was not read ahead of the engine" in capsys.readouterr().out


def test_a_version_of_another_model_is_left_to_the_engine_to_refuse(
    run: RunDir, start: Path, sums: None, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = checkpoint(1)
    del tensors[NORM]
    manifest, reader = publish_version(run, 1, tensors), agent(run, start)
    an_engine(run, start)

    with reading(reader, manifest):
        pass

    assert NORM in capsys.readouterr().out


@pytest.mark.parametrize("damage", [shutil.rmtree, _cut_the_weights, _cut_the_config])
def test_of_the_folder_that_an_engine_was_started_from_nothing_is_needed_later(
    run: RunDir, start: Path, sums: None, damage: Callable[[Path], None]
) -> None:
    manifests, reader = [publish_version(run, version) for version in (1, 2)], agent(run, start)
    _, weights = an_engine(run, start)

    for manifest in manifests:
        with reading(reader, manifest):
            staged = stage(weights, run, manifest)
        assert (weights.swap(staged)["fault"], staged.read_here) == ("", False)
        weights.staging.release()
        if start.exists():
            damage(start)


@pytest.mark.parametrize("damage", [shutil.rmtree, _cut_the_weights, _cut_the_config])
def test_where_that_folder_is_damaged_before_the_first_version_the_engine_reads(
    run: RunDir, start: Path, sums: None, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    manifest, reader = publish_version(run, 1), agent(run, start)
    _, weights = an_engine(run, start)
    damage(start)

    with reading(reader, manifest):
        assert stage(weights, run, manifest).read_here

    out, errors = capfd.readouterr()
    assert "version 1 was not read ahead of the engine" in out
    assert "Traceback" not in errors
