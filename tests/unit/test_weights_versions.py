"""Versions that are published as deltas: exactly the trainer's bytes come out, or an error by name."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages.exchange import decode, encode
from stages.rundir import RunDir, RunDirectoryError
from stages.trainer.replay import whole_weights
from stages.weights.delta_chain import BrokenChainError
from stages.weights.errors import (
    DigestMismatchError,
    ManifestMismatchError,
    NotInFullError,
    RecordError,
    SignatureMismatchError,
    SizeMismatchError,
    WeightsError,
)
from stages.weights.manifest import Manifest
from stages.weights.reader import load_manifest, read_verified
from stages.weights.versions import ChangeError, apply_changes, chain_to, faults, read_version
from tests.delta_kit import (
    copied,
    flip_last_byte,
    payload_file,
    publish_chain,
    publish_next,
    same,
    sparse_publisher,
    start_tensors,
    step,
)
from tests.weights_kit import publish_full


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


# ---- the record ------------------------------------------------------------------------------------------------------


def test_a_manifest_of_a_delta_is_read_as_it_was_written_and_travels_between_ranks(run: RunDir) -> None:
    manifest = publish_chain(run, 2)[0][1]

    assert load_manifest(run, 1, manifest.digest) == manifest
    assert decode(encode(manifest), Manifest | None) == manifest


def test_a_manifest_of_a_full_version_does_not_mention_deltas(run: RunDir) -> None:
    assert "delta" not in publish_chain(run, 1)[0][0].to_record()


def _other_base(delta: dict[str, Any]) -> None:
    delta["base"]["version"] = 1


def _other_start(delta: dict[str, Any]) -> None:
    delta["parts"]["model.up"][0]["start"] = (1, 0)


def _twice(delta: dict[str, Any]) -> None:
    delta["parts"]["model.up"] *= 2


def _other_tensor(delta: dict[str, Any]) -> None:
    delta["parts"]["model.other"] = delta["parts"].pop("model.up")


def _other_result(delta: dict[str, Any]) -> None:
    delta["parts"]["model.up"][0]["delta"]["result"] = "0" * 32


def _gap(delta: dict[str, Any]) -> None:
    delta["parts"]["model.up"][0]["offset"] += 1


def _other_file(delta: dict[str, Any]) -> None:
    delta["parts"]["model.up"][0]["file"] = "config.json"


def _no_parts(delta: dict[str, Any]) -> None:
    delta["parts"]["model.up"] = []


def _no_links(delta: dict[str, Any]) -> None:
    delta["links"] = 0


@pytest.mark.parametrize(
    "spoil",
    [_other_base, _other_start, _twice, _other_tensor, _other_result, _gap, _other_file, _no_parts, _no_links],
)
def test_a_record_that_no_delta_has_is_refused(run: RunDir, spoil: Any) -> None:
    manifest = publish_chain(run, 2)[0][1]
    record = decoded(manifest)
    spoil(record["delta"])

    with pytest.raises(RecordError):
        Manifest.from_record(record)


def decoded(manifest: Manifest) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(json.dumps(manifest.to_record()))
    return record


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_some_tensors_are_read_alone_and_into_given_memory(run: RunDir) -> None:
    manifests, published = publish_chain(run, 4)
    given = torch.full((80, 60), torch.nan)

    found = read_version(run, manifests[3], ["model.down"], into={"model.down": given})

    assert found["model.down"] is given
    assert same(found, {"model.down": published[3]["model.down"]})


def test_the_reader_of_full_versions_refuses_a_delta_by_name(run: RunDir) -> None:
    manifest = publish_chain(run, 2)[0][1]

    with pytest.raises(NotInFullError, match="version 1 is published as a delta of version 0"):
        read_verified(run, manifest)


def test_a_base_that_is_gone_is_named(run: RunDir) -> None:
    manifests, _ = publish_chain(run, 3)
    shutil.rmtree(run.weights_version(1))

    with pytest.raises(BrokenChainError, match="version 1, a base of it, is not published"):
        read_version(run, manifests[2])


def test_another_version_in_the_place_of_the_base_is_refused(run: RunDir) -> None:
    manifests, published = publish_chain(run, 3)
    shutil.rmtree(run.weights_version(1))
    publish_full(run, 1, published[2])

    with pytest.raises(BrokenChainError, match="version 1 has digest"):
        read_version(run, manifests[2])


def test_bytes_that_are_not_the_base_are_refused_by_tensor(run: RunDir) -> None:
    manifests, published = publish_chain(run, 3)

    with pytest.raises(ChangeError, match=r"tensor model\.(up|down), as version 2 changes it: the delta changes bytes"):
        apply_changes(run, manifests[2], copied(published[0]))


def test_a_delta_applied_twice_gives_the_same(run: RunDir) -> None:
    manifests, published = publish_chain(run, 2)
    tensors = copied(published[0])

    apply_changes(run, manifests[1], tensors)
    apply_changes(run, manifests[1], tensors)

    assert same(tensors, published[1])


@pytest.mark.parametrize("of", [0, 1, 2])
def test_damage_anywhere_on_the_way_is_found_by_readers_and_by_the_tool(run: RunDir, of: int) -> None:
    manifests, _ = publish_chain(run, 3)
    flip_last_byte(run.weights_version(0) / "model.safetensors" if of == 0 else payload_file(run, of))

    with pytest.raises((DigestMismatchError, ChangeError)):
        read_version(run, manifests[2])
    assert len(faults(run, manifests[2])) >= 1
    assert all("tensor model" in str(fault) for fault in faults(run, manifests[2]))


def test_a_payload_file_that_was_cut_and_a_small_file_that_was_changed_are_named(run: RunDir) -> None:
    manifests, _ = publish_chain(run, 2)
    os.truncate(payload_file(run, 1), 10)
    flip_last_byte(run.weights_version(1) / "config.json")

    with pytest.raises((SizeMismatchError, DigestMismatchError)):
        read_version(run, manifests[1])
    words = " ".join(map(str, faults(run, manifests[1])))
    assert "delta-00001-00001.bin: 10 bytes" in words
    assert "file config.json" in words


def test_what_a_delta_leaves_as_it_is_is_compared_too(run: RunDir) -> None:
    """A manifest that forgot a change would leave the base's bytes."""
    tensors = start_tensors()
    with sparse_publisher(run) as publisher:
        publish_next(publisher, 0, tensors)
        step(tensors, 1)
        manifest = publish_next(publisher, 1, tensors)
    assert manifest.delta is not None
    forgetful = replace(manifest.delta, parts={"model.up": manifest.delta.parts["model.up"]})

    with pytest.raises(DigestMismatchError, match=r"tensor model\.down"):
        read_version(run, replace(manifest, delta=forgetful))


def test_a_base_of_other_shapes_is_refused_by_name(run: RunDir) -> None:
    manifests, _ = publish_chain(run, 2)
    entry = manifests[1].tensors["model.norm"]
    other = replace(manifests[1], tensors={**manifests[1].tensors, "model.norm": replace(entry, shape=(40, 2))})

    with pytest.raises(SignatureMismatchError, match=r"model\.norm: in version 1: its base, version 0, has F32\[80\]"):
        read_version(run, other)


def test_a_damaged_manifest_of_a_base_is_an_error_by_name(run: RunDir) -> None:
    manifests, _ = publish_chain(run, 2)
    (run.weights_version(0) / "manifest.json").write_text("{")

    with pytest.raises(WeightsError, match=r"v000000/manifest\.json"):
        read_version(run, manifests[1])
    with pytest.raises(ManifestMismatchError):
        load_manifest(run, 1, "0" * 32)


def test_who_holds_the_base_needs_nothing_else(run: RunDir) -> None:
    manifests, _ = publish_chain(run, 4)
    shutil.rmtree(run.weights_version(0))

    assert [link.version for link in chain_to(run, manifests[3], manifests[1].state)] == [2, 3]
    assert chain_to(run, manifests[3], manifests[3].state) == []


# ---- a replay --------------------------------------------------------------------------------------------------------


def test_a_replay_gets_whole_files_of_any_version_and_leaves_none_of_its_own(run: RunDir) -> None:
    _, published = publish_chain(run, 2)

    with whole_weights(run, 0) as folder:
        assert folder == run.weights_version(0)
    with whole_weights(run, 1) as folder:
        assert same(load_file(folder / "model.safetensors"), published[1])
        assert (folder / "config.json").exists()
    assert not folder.exists()


def test_a_replay_of_a_delta_without_its_base_is_a_mistake_with_a_name(run: RunDir) -> None:
    publish_chain(run, 2)
    shutil.rmtree(run.weights_version(0))

    with pytest.raises(RunDirectoryError, match="v000001 cannot be read: version 1 cannot be reached"):
        whole_weights(run, 1).__enter__()
