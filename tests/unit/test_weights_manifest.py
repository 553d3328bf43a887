"""The manifest says everything about a version, and a damaged manifest is never believed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rundir import RunDir
from stages.weights.errors import (
    ManifestMismatchError,
    RecordError,
    SignatureMismatchError,
    VersionNotPublishedError,
    WeightsError,
)
from stages.weights.manifest import Manifest, Probe, check_signature, model_config_digest
from stages.weights.reader import load_manifest
from tests.weights_kit import publish_full, small_tensors


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = RunDir.create(tmp_path_factory.mktemp("manifest") / "run")
    publish_full(run, 0)
    publish_full(run, 1)
    return run


def record_of(manifest: Manifest) -> dict[str, Any]:
    return json.loads(json.dumps(manifest.to_record()))  # type: ignore[no-any-return]


def test_a_manifest_survives_its_record(run: RunDir) -> None:
    manifest = load_manifest(run, 1)

    assert Manifest.from_record(record_of(manifest)) == manifest


@pytest.mark.parametrize(
    "path, value",
    [
        (("version",), 7),
        (("step",), 7),
        (("probe", "token_ids", 0), 6),
        (("probe", "logprobs", 0), -1.5),
        (("model_config_digest",), "0" * 32),
        (("files", "config.json", "xxh3_128"), "0" * 32),
        (("tensors", "model.embed", "shape"), [4, 6]),
        (("tensors", "model.embed", "parts", 0, "shape"), [4, 6]),
        (("tensors", "model.embed", "parts", 0, "xxh3_128"), "0" * 32),
        (("tensors", "model.embed", "xxh3_128"), "0" * 32),
        (("tensors", "model.embed", "dtype"), "BF16"),
        (("tensors", "model.embed", "dtype"), "I64"),
        (("tensors", "model.embed", "offset"), 8),
        (("tensors", "model.embed", "file"), "other.safetensors"),
        (("files", "model.safetensors", "bytes"), 10_000),
        (("version",), True),
        (("version",), "1"),
        (("digest",), "0" * 32),
        (("extra",), 1),
    ],
)
def test_any_changed_field_is_noticed(run: RunDir, path: tuple[str | int, ...], value: Any) -> None:
    record = record_of(load_manifest(run, 1))
    inner: Any = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value

    with pytest.raises(RecordError):
        Manifest.from_record(record)


def test_a_missing_field_is_named(run: RunDir) -> None:
    record = record_of(load_manifest(run, 1))
    del record["probe"]

    with pytest.raises(RecordError, match="field 'probe': missing"):
        Manifest.from_record(record)


@pytest.mark.parametrize("name", ["../evil", "a/b", ".hidden", "", "manifest.json"])
def test_a_file_name_that_leaves_the_folder_is_refused(run: RunDir, name: str) -> None:
    record = record_of(load_manifest(run, 1))
    record["files"][name] = copy.deepcopy(record["files"]["config.json"])

    with pytest.raises(RecordError, match="not a plain file name"):
        Manifest.from_record(record)


@settings(deadline=None)
@given(data=st.data())
def test_a_flipped_byte_of_the_manifest_changes_nothing_or_is_refused(run: RunDir, data: st.DataObject) -> None:
    path = run.weights_version(1) / "manifest.json"
    sound, manifest = path.read_bytes(), load_manifest(run, 1)
    place = data.draw(st.integers(0, len(sound) - 1))
    flip = data.draw(st.integers(1, 255))
    path.write_bytes(sound[:place] + bytes([sound[place] ^ flip]) + sound[place + 1 :])

    try:
        assert load_manifest(run, 1) == manifest  # a stamp (sequence, writer) or a space
    except WeightsError:
        pass
    finally:
        path.write_bytes(sound)


def test_a_version_that_is_not_there_is_named(run: RunDir) -> None:
    with pytest.raises(VersionNotPublishedError, match="version 9 is not published"):
        load_manifest(run, 9)


def test_another_digest_than_requested_is_refused(run: RunDir) -> None:
    with pytest.raises(ManifestMismatchError, match="digest"):
        load_manifest(run, 1, expected_digest="0" * 32)


def test_a_folder_renamed_to_another_version_is_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    publish_full(run, 1)
    run.weights_version(1).rename(run.weights_version(2))

    with pytest.raises(ManifestMismatchError, match="version is 1, wanted 2"):
        load_manifest(run, 2)


def test_versions_of_equal_weights_have_equal_tensors_and_different_digests(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    first, second = publish_full(run, 1, small_tensors()), publish_full(run, 2, small_tensors())

    assert first.tensors == second.tensors
    assert first.digest != second.digest


@pytest.mark.parametrize(
    "ids, logprobs", [((1, 2), ()), ((1,), ()), ((1, 2), (float("nan"),)), ((1, 2), (float("-inf"),))]
)
def test_a_probe_that_proves_nothing_is_refused(ids: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
    with pytest.raises(RecordError, match="logprobs"):
        Probe(ids, logprobs)


def test_the_architecture_digest_ignores_number_format_and_library() -> None:
    one = {"hidden_size": 8, "torch_dtype": "float32", "transformers_version": "4.50"}
    two = {"dtype": "bfloat16", "hidden_size": 8, "_name_or_path": "x"}

    assert model_config_digest(one) == model_config_digest(two)
    assert model_config_digest(one) != model_config_digest({"hidden_size": 9})


def test_a_model_of_another_shape_is_refused_by_the_name_of_its_tensor(run: RunDir) -> None:
    manifest = load_manifest(run, 1)
    fitting = {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
    check_signature(manifest, fitting)

    for changed, tensor in [
        ({**fitting, "model.embed": ("F32", (7, 4))}, "model.embed"),
        ({**fitting, "model.scale": ("BF16", ())}, "model.scale"),
        ({**fitting, "model.extra": ("F32", (1,))}, "model.extra"),
        ({name: kind for name, kind in fitting.items() if name != "model.embed"}, "model.embed"),
    ]:
        with pytest.raises(SignatureMismatchError) as caught:
            check_signature(manifest, changed)
        assert caught.value.tensor == tensor
