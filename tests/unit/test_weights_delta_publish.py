"""When a version is published as a delta, what is in it, and what a failure leaves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.sections import WeightsConfig
from stages.rundir import RunDir
from stages.weights import encoder, snapshot
from stages.weights.delta import encode as encode_delta
from stages.weights.delta_chain import MOST_LINKS, State
from stages.weights.errors import (
    NoSpaceError,
    PublishError,
)
from stages.weights.manifest import Manifest
from stages.weights.ranks import RankGroup
from stages.weights.reader import load_manifest, read_verified
from stages.weights.tensors import LocalTensor
from stages.weights.versions import chain_to, faults, read_version
from tests.delta_kit import (
    copied,
    publish_chain,
    publish_next,
    same,
    sparse_publisher,
    start_tensors,
    step,
    whole,
)
from tests.weights_kit import PROBE, publish_full, run_ranks


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def is_delta(manifest: Manifest) -> bool:
    return manifest.delta is not None


@pytest.mark.exercises("weights.delta")
@pytest.mark.parametrize(("delta", "found"), [("off", [False, False]), ("sparse", [False, True])])
def test_the_first_version_is_full_and_the_next_a_delta_where_the_option_says_so(
    run: RunDir, delta: str, found: list[bool]
) -> None:
    manifests, published = publish_chain(run, 2, delta=delta)

    assert [is_delta(manifest) for manifest in manifests] == found
    for manifest, tensors in zip(manifests, published, strict=True):
        assert same(read_version(run, load_manifest(run, manifest.version, manifest.digest)), tensors)


def test_a_delta_costs_the_bytes_that_changed_and_nothing_for_other_tensors(run: RunDir) -> None:
    full, delta = publish_chain(run, 2)[0]

    assert delta.delta is not None
    assert delta.delta.base == State(0, full.digest)
    assert delta.delta.parts.keys() == {"model.up", "model.down"}
    assert delta.delta.bytes < 0.1 * full.weight_bytes
    assert sorted(os.listdir(run.weights_version(1))) == [
        "config.json",
        "delta-00001-00001.bin",
        "manifest.json",
        "tokenizer.json",
    ]


def test_digests_of_tensors_are_those_of_the_full_version(run: RunDir, tmp_path: Path) -> None:
    manifests, published = publish_chain(run, 3)
    other = publish_full(RunDir.create(tmp_path / "other"), 2, published[2])

    assert {name: entry.xxh3_128 for name, entry in manifests[2].tensors.items()} == {
        name: entry.xxh3_128 for name, entry in other.tensors.items()
    }
    assert manifests[2].tensors == other.tensors
    assert manifests[2].weight_bytes == other.weight_bytes


def test_a_version_without_changes_has_no_payload(run: RunDir) -> None:
    tensors = start_tensors()
    with sparse_publisher(run) as publisher:
        publish_next(publisher, 0, tensors)
        manifest = publish_next(publisher, 1, tensors)

    assert manifest.delta is not None
    assert manifest.delta.bytes == 0
    assert same(read_version(run, manifest), tensors)


def test_so_many_deltas_follow_each_other_at_most(run: RunDir) -> None:
    manifests, published = publish_chain(run, MOST_LINKS + 3)

    full = [manifest.version for manifest in manifests if not is_delta(manifest)]
    assert full == [0, MOST_LINKS + 1]
    assert same(read_version(run, manifests[MOST_LINKS]), published[MOST_LINKS])
    assert len(chain_to(run, manifests[MOST_LINKS])) == MOST_LINKS + 1


def test_a_step_that_changes_much_is_published_in_full(run: RunDir) -> None:
    tensors = start_tensors()
    with sparse_publisher(run) as publisher:
        publish_next(publisher, 0, tensors)
        step(tensors, 1, share=1.0)
        much = publish_next(publisher, 1, tensors)
        step(tensors, 2)
        little = publish_next(publisher, 2, tensors)

    assert not is_delta(much)
    assert little.delta is not None
    assert little.delta.base == much.state
    assert same(read_version(run, little), tensors)


@pytest.mark.parametrize("how", [{"in_full": True}, {"lend": True}])
def test_the_caller_can_have_a_version_in_full(run: RunDir, how: dict[str, bool]) -> None:
    tensors = start_tensors()
    with sparse_publisher(run) as publisher:
        publish_next(publisher, 0, tensors)
        manifest = publish_next(publisher, 1, tensors, **how)

    assert not is_delta(manifest)
    assert same(read_verified(run, manifest), tensors)


def test_lent_tensors_are_no_base(run: RunDir) -> None:
    tensors = start_tensors()
    with sparse_publisher(run) as publisher:
        publish_next(publisher, 0, tensors, lend=True)

        assert not is_delta(publish_next(publisher, 1, tensors))


def test_another_layout_of_the_ranks_makes_a_full_version(run: RunDir) -> None:
    tensors = start_tensors()
    with sparse_publisher(run) as publisher:
        publish_next(publisher, 0, tensors)
        halves = [
            LocalTensor.along("model.up", (60, 80), 0, 0, tensors["model.up"][:30]),
            LocalTensor.along("model.up", (60, 80), 0, 30, tensors["model.up"][30:]),
            *whole({name: tensor for name, tensor in tensors.items() if name != "model.up"}),
        ]
        manifest = publisher.begin(1, 1, halves, PROBE).finish()

    assert not is_delta(manifest)
    assert same(read_verified(run, manifest), tensors)


def test_the_first_version_of_an_attempt_is_full_and_takes_the_place_of_a_delta(run: RunDir) -> None:
    _, published = publish_chain(run, 3)
    run.start_attempt(1)
    later = replace(run, attempt=1)

    with sparse_publisher(later) as publisher:
        manifest = publish_next(publisher, 2, published[2])

    assert not is_delta(manifest)
    assert same(read_verified(later, load_manifest(later, 2, manifest.digest)), published[2])


def test_parameters_may_change_once_begin_has_returned(run: RunDir) -> None:
    tensors = start_tensors()
    with sparse_publisher(run) as publisher:
        publish_next(publisher, 0, tensors)
        step(tensors, 1)
        before = copied(tensors)
        publication = publisher.begin(1, 1, whole(tensors), PROBE)
        for tensor in tensors.values():
            tensor.fill_(torch.nan)
        manifest = publication.finish()

    assert is_delta(manifest)
    assert same(read_version(run, manifest), before)


def test_two_host_copies_are_kept_however_many_versions(run: RunDir) -> None:
    tensors, reports = start_tensors(), []
    with sparse_publisher(run) as publisher:
        for version in range(5):
            step(tensors, version)
            publication = publisher.begin(version, version, whole(tensors), PROBE)
            publication.finish()
            reports.append(publication.report.peak_extra_host_bytes)
            allocated = publisher.copier.allocated_bytes

    assert allocated == 2 * reports[0], "one for the version before"
    assert all(allocated <= peak < 1.1 * allocated for peak in reports[1:])


@pytest.mark.parametrize("moment", ["begin", "encode", "write"])
def test_after_a_failure_nothing_is_visible_and_the_next_version_is_full(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "no space")

    tensors = start_tensors()
    place = {
        "begin": "stages.weights.publication.sweep_leftovers",
        "encode": "stages.weights.encoder.encode",
        "write": "os.pwrite",
    }[moment]
    with sparse_publisher(run) as publisher:
        publish_next(publisher, 0, tensors)
        step(tensors, 1)
        with monkeypatch.context() as broken:
            broken.setattr(place, fail)
            with pytest.raises((PublishError, NoSpaceError)):
                publish_next(publisher, 1, tensors)
        assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000000"]
        manifests = []
        for version in (2, 3, 4):
            step(tensors, version)
            manifests.append(publish_next(publisher, version, tensors))

    assert [is_delta(manifest) for manifest in manifests] == [False, True, True]
    assert same(read_version(run, manifests[-1]), tensors)


def test_a_delta_for_which_there_is_no_room_is_not_begun(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = start_tensors()
    with sparse_publisher(run) as publisher:
        publish_next(publisher, 0, tensors)
        monkeypatch.setattr("stages.weights.publication.available_bytes", lambda _: 1000)

        with pytest.raises(NoSpaceError):
            publish_next(publisher, 1, tensors)


def test_ranks_write_their_own_payloads_and_pieces_of_any_shape(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 2000)
    monkeypatch.setattr("stages.weights.encoder._FILE_BYTES", 300)
    versions = [start_tensors()]
    for seed in (1, 2):
        versions.append(copied(versions[-1]))
        step(versions[-1], seed)

    def owned(tensors: dict[str, torch.Tensor], rank: int) -> list[LocalTensor]:
        shares = [
            LocalTensor.along("model.up", (60, 80), 0, 30 * rank, tensors["model.up"][30 * rank : 30 * rank + 30]),
            LocalTensor.along(
                "model.down", (80, 60), 1, 30 * rank, tensors["model.down"][:, 30 * rank : 30 * rank + 30]
            ),
        ]
        rest = {name: tensors[name] for name in ("model.norm", "model.scale")}
        return [*shares, *(whole(rest) if rank else [])]

    def body(group: RankGroup) -> list[Manifest]:
        with sparse_publisher(run, group) as publisher:
            return [
                publisher.begin(version, version, owned(tensors, group.rank), PROBE).finish()
                for version, tensors in enumerate(versions)
            ]

    manifests = [future.result() for future in run_ranks(2, body)]

    assert manifests[0] == manifests[1]
    assert [is_delta(manifest) for manifest in manifests[0]] == [False, True, True]
    names = os.listdir(run.weights_version(2))
    assert {"delta-00001-00001.bin", "delta-00001-00002.bin", "delta-00002-00001.bin"} <= set(names)
    for manifest, tensors in zip(manifests[0], versions, strict=True):
        assert same(read_version(run, load_manifest(run, manifest.version, manifest.digest)), tensors)
        assert faults(run, manifest) == []


def test_a_rank_whose_comparison_fails_fails_the_publication_on_all(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:

    def failing(base: Any, new: Any, *rest: Any, **how: Any) -> Any:
        if len(new) == 40:
            raise RuntimeError("memory lost")
        return encode_delta(base, new, *rest, **how)

    monkeypatch.setattr(encoder, "encode", failing)

    def body(group: RankGroup) -> Manifest:
        with sparse_publisher(run, group) as publisher:
            name, size = f"rank {group.rank}", 1000 if group.rank == 0 else 10
            publish_next(publisher, 0, {name: torch.zeros(size)})
            return publish_next(publisher, 1, {name: torch.ones(size)})

    errors = [future.exception() for future in run_ranks(2, body)]

    assert [type(error) for error in errors] == [PublishError] * 2
    assert all("trainer rank 1 of 2: RuntimeError: memory lost" in str(error) for error in errors)
    assert run.published_versions() == [0]


def test_the_publisher_of_a_pushed_or_single_version_never_makes_a_delta(run: RunDir) -> None:
    publish_chain(run, 1)

    manifest = publish_full(run, 1, start_tensors(), WeightsConfig(dtype="float32", delta="sparse"))

    assert not is_delta(manifest)


def test_a_rank_that_has_no_base_makes_the_version_full_on_all(run: RunDir) -> None:
    def body(group: RankGroup) -> list[Manifest]:
        tensors = {f"rank {group.rank}": torch.zeros(1000)}
        with sparse_publisher(run, group) as publisher:
            return [
                publish_next(publisher, version, tensors, lend=(version, group.rank) == (1, 1)) for version in range(4)
            ]

    manifests = [future.result() for future in run_ranks(2, body)]

    assert manifests[0] == manifests[1]
    assert [is_delta(manifest) for manifest in manifests[0]] == [False, False, False, True]
