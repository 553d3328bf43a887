"""Which small files travel with a version, so that its folder is a complete HF folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema import LibraConfig
from conf.sections import WeightsConfig
from stages.rundir import RunDir
from stages.weights.errors import PublishError
from stages.weights.hf_folder import other_tokenizer, small_files
from stages.weights.publish import publish
from stages.weights.reader import verify
from stages.weights.tensors import LocalTensor
from tests.weights_kit import PROBE, make_source, small_tensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_source(tmp_path / "model")
    (folder / "vocab.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"top_p": 0.5}')
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json", "notes.txt"):
        (folder / name).write_text(f"{name} of the tokenizer")
    (folder / "tokenizer_parts").mkdir()
    return folder


def test_files_of_the_model_s_own_tokenizer_travel(model: Path) -> None:
    assert set(small_files(model, "bfloat16")) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "vocab.json",
    }


def test_another_tokenizer_takes_the_place_of_the_model_s_own(model: Path, tokenizer: Path) -> None:
    files = small_files(model, "bfloat16", tokenizer)

    assert set(files) == {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert files["tokenizer.json"] == b"tokenizer.json of the tokenizer"
    assert files["generation_config.json"] == b'{"top_p": 0.5}'


@pytest.mark.parametrize("exists", [True, False])
def test_a_tokenizer_folder_without_tokenizer_is_an_error_with_its_option(
    model: Path, tmp_path: Path, exists: bool
) -> None:
    folder = tmp_path / "empty"
    if exists:
        folder.mkdir()

    with pytest.raises(PublishError, match=r"tokenizer_path=.*empty has no tokenizer files"):
        small_files(model, "bfloat16", folder)


@pytest.mark.exercises("tokenizer_path")
@pytest.mark.parametrize(("path", "other"), [("", None), ("/model", None), ("/other", Path("/other"))])
def test_only_a_tokenizer_path_beside_model_path_is_another_tokenizer(path: str, other: Path | None) -> None:
    assert other_tokenizer(LibraConfig(model_path="/model", tokenizer_path=path)) == other


def test_the_tokenizer_s_files_are_under_the_digests_of_the_version(
    tmp_path: Path, model: Path, tokenizer: Path
) -> None:
    run = RunDir.create(tmp_path / "run")

    manifest = publish(
        run,
        version=1,
        step=1,
        tensors=[LocalTensor.whole(name, tensor) for name, tensor in small_tensors().items()],
        probe=PROBE,
        source_folder=model,
        tokenizer_folder=tokenizer,
        options=WeightsConfig(),
    )

    verify(run, manifest)
    assert "chat_template.jinja" in manifest.files
    text = (run.weights_version(1) / "tokenizer.json").read_text()
    assert text == "tokenizer.json of the tokenizer"
