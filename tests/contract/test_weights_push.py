"""A HF folder that is pushed into a run is published like a trainer's version, or refused by name before anything is written."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.schema import LibraConfig
from stages.rundir import FencedError
from stages.weights.__main__ import main
from stages.weights.errors import PublishError, RecordError, WeightsError
from stages.weights.manifest import Manifest
from stages.weights.push import PushRefusedError, push
from stages.weights.reader import load_manifest, read_verified, verify
from tests.rollout_kit import cpu_config, logprobs_of, make_run, save_model, tiny_model

PROJECT = Path(__file__).parents[2]
TRAINER_PROBE = """
import json, sys
from pathlib import Path
from stages.context import open_context
from stages.trainer.parallel import connected
from stages.trainer.policy import Policy
from stages.trainer.probe import probe

with open_context("trainer", sys.argv[1], name="trainer-probe", alone=True) as context, connected(context, tp=1) as grid:
    print(json.dumps(vars(probe(Policy.load(Path(sys.argv[2]), context.config, grid)))))
"""


class Scene:
    """A run whose model_path is a tiny Llama (seed 0), and another of the same architecture (seed 1) to be pushed."""

    def __init__(self, folder: Path, *, tied: bool = False, **weights: Any) -> None:
        self.start = save_model(tiny_model(0, tied=tied), folder / "start")
        self.model = tiny_model(1, tied=tied)
        self.pushed = save_model(self.model, folder / "pushed")
        self.config = cpu_config(self.start)
        self.config = replace(self.config, train_dtype="float32", weights=replace(self.config.weights, **weights))
        self.run = make_run(folder / "run", self.config)

    def push(self, config: LibraConfig | None = None) -> Manifest:
        return push(replace(self.run, writer="push"), config or self.config, self.pushed)

    def edit_config(self, **changes: Any) -> None:
        path = self.pushed / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def edit_tensors(self, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        path = self.pushed / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    def is_untouched(self) -> bool:
        return not os.listdir(self.run.weights)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_the_first_push_is_version_0_and_holds_the_folder_s_tensors(scene: Scene) -> None:
    manifest = scene.push()

    verify(scene.run, manifest)
    assert manifest.version == 0
    assert load_manifest(scene.run, 0) == manifest
    found = read_verified(scene.run, manifest)
    stored = load_file(scene.pushed / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
    record = scene.run.read(scene.run.latest_json)
    assert record is not None
    assert (record["version"], record["writer"]) == (0, "push")


def test_a_push_is_the_version_after_the_newest_also_beside_a_damaged_one(scene: Scene) -> None:
    scene.push()
    (scene.run.weights / "v000007").mkdir()

    manifest = scene.push()

    assert manifest.version == 8
    assert load_manifest(scene.run, 0).probe.token_ids == manifest.probe.token_ids


def test_the_probe_is_what_the_trainer_says_about_the_same_folder(scene: Scene) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINER_PROBE, str(scene.run.root), str(scene.pushed)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    said = json.loads(done.stdout.splitlines()[-1])

    manifest = scene.push()

    assert list(manifest.probe.token_ids) == said["token_ids"]
    assert manifest.probe.logprobs == pytest.approx(said["logprobs"], abs=1e-5)


def test_the_probe_is_of_the_rounded_values_that_are_published(tmp_path: Path) -> None:
    scene = Scene(tmp_path, dtype="bfloat16")

    manifest = scene.push()

    with torch.no_grad():
        for parameter in scene.model.parameters():
            parameter.copy_(parameter.bfloat16())
    said = logprobs_of(scene.model, list(manifest.probe.token_ids))
    assert manifest.probe.logprobs == pytest.approx(said, abs=1e-6)
    assert {entry.dtype for entry in manifest.tensors.values()} == {"BF16"}


def test_a_tied_model_is_published_without_its_head_wherever_that_is_stored(tmp_path: Path) -> None:
    scene = Scene(tmp_path, tied=True)
    scene.edit_tensors(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))

    manifest = scene.push()

    assert "lm_head.weight" not in manifest.tensors


def test_the_version_has_config_and_tokenizer_of_the_run(scene: Scene, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    scene.edit_config(eos_token_id=9)

    scene.push(replace(scene.config, tokenizer_path=str(tokenizer)))

    folder = scene.run.weights_version(0)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] != 9


def test_the_newest_version_stands_in_for_a_model_path_that_is_gone(scene: Scene) -> None:
    scene.push()
    for file in scene.start.iterdir():
        file.unlink()

    assert scene.push().model_config_digest == load_manifest(scene.run, 0).model_config_digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 0.5}, "rms_norm_eps is 0.5, wanted 1e-06"),
        ({"architectures": ["Qwen2ForCausalLM"]}, r"architectures is \['Qwen2ForCausalLM'\]"),
        ({"model_type": "no_such_type"}, "is not one that transformers reads"),
        ({"hidden_size": "wide"}, "is not one that transformers reads"),
    ],
)
def test_another_architecture_is_refused_by_what_differs(scene: Scene, changes: dict[str, Any], words: str) -> None:
    scene.edit_config(**changes)

    with pytest.raises(PushRefusedError, match=words):
        scene.push()

    assert scene.is_untouched()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks tensor model.norm.weight, which .*start has"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "has a tensor extra, which .*start has not"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), r"has shape \[3\], in .*start it has"),
    ],
)
def test_other_tensors_are_refused_by_name(scene: Scene, edit: Any, words: str) -> None:
    scene.edit_tensors(edit)

    with pytest.raises(PushRefusedError, match=words):
        scene.push()

    assert scene.is_untouched()


def test_broken_weights_are_refused(scene: Scene) -> None:
    scene.edit_tensors(lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))

    with pytest.raises(RecordError, match="not finite: the weights are broken"):
        scene.push()

    assert scene.is_untouched()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), "is missing or not a safetensors file"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "is not a safetensors index"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"model.norm.bias": "model.safetensors"}}'
            ),
            "says that model.norm.bias lies in model.safetensors; it does not",
        ),
    ],
)
def test_a_folder_that_is_no_hf_model_is_refused(scene: Scene, spoil: Any, words: str) -> None:
    spoil(scene.pushed)

    with pytest.raises(WeightsError, match=words):
        scene.push()

    assert scene.is_untouched()


def test_two_pushes_at_a_time_are_refused(scene: Scene) -> None:
    with scene.run.run_json.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        with pytest.raises(PushRefusedError, match=r"another push into .* is under way"):
            scene.push()


def test_an_attempt_that_begins_meanwhile_fences_the_push_out(scene: Scene) -> None:
    scene.run.start_attempt(1)

    with pytest.raises((FencedError, PublishError), match=r"attempt 0 .* is over"):
        scene.push()

    assert scene.is_untouched()


def test_the_command_publishes_and_tells_what_becomes_of_it(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(scene.run.root), str(scene.pushed), "--no-trainer"]) == 0

    out = capsys.readouterr().out
    assert "version 0 is published" in out
    assert f"digest {load_manifest(scene.run, 0).digest}" in out
    assert "Training does not go on from it" in out


@pytest.mark.parametrize("name", ["nowhere", "start/config.json"])
def test_the_command_refuses_what_is_no_folder(
    scene: Scene, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(scene.run.root), str(tmp_path / name), "--no-trainer"]) == 2

    assert "is not a folder; wanted a HF model folder" in capsys.readouterr().err
