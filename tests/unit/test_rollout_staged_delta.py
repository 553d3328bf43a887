"""A staged version that becomes the next one in place: what dies on the way, what does not fit, and what others find."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.rollout import memory_folder, staging
from stages.rollout.engine_weights import EngineWeights
from stages.rollout.staged_delta import name_of, patch
from stages.rollout.staging import SegmentLayout, Staging
from stages.rundir import RunDir
from stages.weights.delta_chain import BrokenChainError
from stages.weights.errors import DigestMismatchError
from stages.weights.manifest import Manifest
from stages.weights.reader import load_manifest
from stages.weights.versions import ChangeError, read_version
from tests.delta_kit import (
    SHAPES,
    KilledError,
    Tensors,
    copied,
    dying,
    fill_unless_killed,
    flip_last_byte,
    payload_file,
    publish_chain,
    publish_next,
    same,
    sparse_publisher,
)
from tests.engine_kit import EngineModel, checkpoint, engine, loaded, part_sums_on_the_host, start_folder

LAYOUT = SegmentLayout.of({name: ("F32", shape) for name, shape in SHAPES.items()})


@pytest.fixture(params=["shared", "private"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    shm = tmp_path / "shm"
    if request.param == "shared":
        shm.mkdir()
    monkeypatch.setattr(memory_folder, "_SHARED_MEMORY", shm)
    return RunDir.create(tmp_path / "run")


class Node:
    """A worker that stages versions as `EngineWeights.stage` does; `read` counts those that came from whole files."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.staging = Staging(run.run_id, LAYOUT, for_cuda=False)
        self.read: list[int] = []

    @property
    def name(self) -> str:
        return (self.staging._segment or self.staging).name()

    def stage(self, manifest: Manifest) -> bool:
        tensors = self.staging.tensors

        def fill() -> None:
            self.read.append(manifest.version)
            read_version(self.run, manifest, into=tensors)

        def change(found: str, write_name: Any) -> bool:
            return patch(self.run, manifest, tensors, found, write_name)

        is_new = self.staging.hold(name_of(manifest.state), fill, deadline_s=1.0, check=lambda: None, patch=change)
        self.staging.release()
        return is_new

    def holds(self, tensors: Tensors) -> bool:
        return same(self.staging.tensors, tensors)


def test_a_version_is_made_of_the_one_before_in_place(run: RunDir) -> None:
    node = Node(run)
    manifests, published = publish_chain(run, 4)

    for manifest, tensors in zip(manifests, published, strict=True):
        assert node.stage(manifest)
        assert node.holds(tensors)
        assert node.name == name_of(manifest.state)

    assert node.read == [0]


def test_who_missed_some_versions_goes_through_them(run: RunDir) -> None:
    node = Node(run)
    manifests, published = publish_chain(run, 6)
    node.stage(manifests[1])
    shutil.rmtree(run.weights_version(0))

    node.stage(manifests[5])

    assert node.holds(published[5])
    assert node.read == [1]


def test_who_comes_late_reads_the_full_version_and_all_deltas(run: RunDir) -> None:
    manifests, published = publish_chain(run, 6)
    node = Node(run)

    node.stage(manifests[5])

    assert node.holds(published[5])
    assert node.read == [5]


def test_a_full_version_between_is_read_instead(run: RunDir) -> None:
    node = Node(run)
    manifests, published = publish_chain(run, 2)
    node.stage(manifests[1])
    tensors = copied(published[1])
    with sparse_publisher(run) as publisher:
        full = publish_next(publisher, 2, tensors)
        tensors["model.up"][0] += 1.0
        delta = publish_next(publisher, 3, tensors)
    assert (full.delta, delta.delta is None) == (None, False)

    node.stage(delta)

    assert node.holds(tensors)
    assert node.read == [1, 3]


def test_what_is_staged_of_another_attempt_is_no_base(run: RunDir) -> None:
    node = Node(run)
    manifests, _ = publish_chain(run, 2)
    node.stage(manifests[1])
    shutil.rmtree(run.weights)
    run.weights.mkdir()
    others, published = publish_chain(run, 3, dtype="float32", max_file_bytes=20_000)
    assert others[1].digest != manifests[1].digest

    node.stage(others[2])

    assert node.holds(published[2])
    assert node.read == [1, 2]


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_bytes_that_are_not_what_they_are_called_are_refused_and_read_anew_when_asked_again(run: RunDir) -> None:
    node = Node(run)
    manifests, published = publish_chain(run, 2)
    node.stage(manifests[0])
    node.staging.tensors["model.up"][3, 3] = 7.0

    with pytest.raises(ChangeError, match=r"tensor model\.up, as version 1 changes it"):
        node.stage(manifests[1])
    assert node.name == ""

    node.stage(manifests[1])
    assert node.holds(published[1])
    assert node.read == [0, 1]


def test_damage_in_what_a_delta_does_not_change_is_found(run: RunDir) -> None:
    node = Node(run)
    manifests, published = publish_chain(run, 2)
    node.stage(manifests[0])
    node.staging.tensors["model.norm"][3] = 7.0

    with pytest.raises(DigestMismatchError, match=r"tensor model\.norm"):
        node.stage(manifests[1])
    assert node.name == ""

    node.stage(manifests[1])
    assert node.holds(published[1])


def test_a_damaged_payload_is_refused_by_tensor_each_time(run: RunDir) -> None:
    node = Node(run)
    manifests, published = publish_chain(run, 2)
    node.stage(manifests[0])
    flip_last_byte(payload_file(run, 1))

    for _ in range(2):
        with pytest.raises(ChangeError, match=r"as version 1 changes it: the payload's digest is"):
            node.stage(manifests[1])
        assert node.name == ""

    node.stage(manifests[0])
    assert node.holds(published[0])


def test_without_a_way_from_what_is_there_or_from_the_files_the_missing_version_is_named(run: RunDir) -> None:
    node = Node(run)
    manifests, _ = publish_chain(run, 4)
    node.stage(manifests[0])
    shutil.rmtree(run.weights_version(2))

    with pytest.raises(BrokenChainError, match="version 3 cannot be reached: version 2"):
        node.stage(manifests[3])
    assert node.name == ""


# ---- who dies --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_fill", fill_unless_killed(staging._fill))


def die_while_staging(run: RunDir, node: Node, version: int, part: int) -> None:
    """In the middle of the part of that number."""
    with pytest.raises(KilledError), dying(part):
        node.stage(load_manifest(run, version))
    node.staging.release()  # as the kernel does


@pytest.mark.usefixtures("mortal")
@pytest.mark.parametrize(("part", "half_way"), [(0, 1), (3, 2)])
def test_what_a_killed_process_left_half_way_is_completed_in_place(run: RunDir, part: int, half_way: int) -> None:
    node = Node(run)
    manifests, published = publish_chain(run, 4)
    node.stage(manifests[0])

    die_while_staging(run, node, 2, part)

    assert node.name == f"{name_of(manifests[half_way - 1].state)} on its way to {name_of(manifests[half_way].state)}"
    assert not any(node.holds(tensors) for tensors in published), "it is neither the one nor the other"
    node.stage(manifests[3])
    assert node.holds(published[3])
    assert node.read == [0]


@pytest.mark.usefixtures("mortal")
@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_what_a_killed_process_left_half_way_never_counts_as_a_version(run: RunDir, wanted: int) -> None:
    node = Node(run)
    manifests, published = publish_chain(run, 4)
    node.stage(manifests[0])
    die_while_staging(run, node, 1, 1)

    assert node.stage(manifests[wanted])

    assert node.holds(published[wanted])


@pytest.mark.usefixtures("mortal")
def test_half_way_to_a_version_that_is_gone_the_bytes_are_read_anew(run: RunDir) -> None:
    node = Node(run)
    manifests, published = publish_chain(run, 2)
    node.stage(manifests[0])
    die_while_staging(run, node, 1, 0)
    shutil.rmtree(run.weights_version(1))
    with sparse_publisher(run) as publisher:
        again = publish_next(publisher, 2, published[1])

    node.stage(again)

    assert node.holds(published[1])
    assert node.read == [0, 2]


@pytest.mark.usefixtures("mortal")
def test_a_killed_process_that_read_a_late_joiners_way_leaves_nothing(run: RunDir) -> None:
    node = Node(run)
    manifests, published = publish_chain(run, 3)

    die_while_staging(run, node, 2, 1)

    assert node.name == ""
    node.stage(manifests[2])
    assert node.holds(published[2])


DYING = """
import os, signal, sys
from pathlib import Path
from stages.rollout import memory_folder, staging
memory_folder._SHARED_MEMORY = Path(sys.argv[1])
from stages.rundir import RunDir
from stages.weights import versions
from stages.weights.reader import load_manifest
from tests.unit.test_rollout_staged_delta import Node
def overwrite(delta, payload, target, **how):
    target[: len(target) // 2] = 7
    os.kill(os.getpid(), signal.SIGKILL)
versions.overwrite = overwrite
run = RunDir.open(Path(sys.argv[2]), writer="dying")
Node(run).stage(load_manifest(run, 1))
"""


@pytest.mark.parametrize("run", ["shared"], indirect=True)
def test_a_process_that_gets_a_kill_leaves_the_same(run: RunDir) -> None:
    """It damages more than a delta can: what is completed is compared, too."""
    node = Node(run)
    manifests, published = publish_chain(run, 2)
    node.stage(manifests[0])

    arguments = [str(memory_folder._SHARED_MEMORY), str(run.root)]
    done = subprocess.run([sys.executable, "-c", DYING, *arguments], timeout=60, check=False)

    assert done.returncode == -signal.SIGKILL
    assert node.name == f"{name_of(manifests[0].state)} on its way to {name_of(manifests[1].state)}"
    with pytest.raises(ChangeError, match="the delta gave bytes with digest"):
        node.stage(manifests[1])
    node.stage(manifests[1])
    assert node.holds(published[1])


# ---- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_follows_deltas_and_all_its_checksums_are_those_of_the_version(
    run: RunDir, tmp_path: Path, size: int, published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if published:
        part_sums_on_the_host(monkeypatch)
    start = start_folder(tmp_path / "start", checkpoint(0))
    engines = [engine(run, loaded(EngineModel(rank, size), checkpoint(0)), start) for rank in range(size)]
    tensors = checkpoint(0)
    with sparse_publisher(run) as publisher:
        for version in range(3):
            manifest = publish_next(publisher, version, tensors)
            for weights in engines:
                used = check_swap(run, weights, manifest, tensors)
                assert used == (0 if not published else len(manifest.tensors) if size == 1 else 1)
            tensors["model.embed_tokens.weight"][1, 1] += 1.0
    assert load_manifest(run, 2).delta is not None


def check_swap(run: RunDir, weights: EngineWeights, manifest: Manifest, tensors: Tensors) -> int:
    """How many of the compared sums were the trainer's."""
    staged = weights.stage(run, manifest, deadline_s=5.0, check=lambda: None)
    assert weights.swap(staged)["fault"] == ""
    weights.staging.release()
    model = weights._model
    wanted = loaded(EngineModel(model.rank, model.size), tensors)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), wanted.parameters(), strict=True))
    return staged.published_sums
