"""`python -m stages.weights`: what people see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.rundir import RunDir
from stages.weights.__main__ import main
from stages.weights.refresh import request_refresh
from tests.weights_kit import INSTANCES, Answers, as_writer, make_context, publish_full, register, small_tensors


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), "trainer")


def test_inspect_shows_versions_instances_and_refreshes(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    publish_full(run, 0)
    manifest = publish_full(run, 1)
    for instance in INSTANCES:
        register(run, instance, version=1, manifest_digest=manifest.digest, leases=(1,))
        Answers(run, manifest).write(instance, total_reload_s=2.0 if instance.endswith("1") else 1.0)
    request_refresh(make_context(run), manifest, INSTANCES, publish_s=0.125)

    assert main(["inspect", str(run.root)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("1 ") and manifest.digest in line and line.endswith("newest") for line in lines)
    assert any(line.startswith("rollout_001") and manifest.digest in line for line in lines)
    assert any("0.125" in line and line.endswith("rollout_001") for line in lines)


def test_inspect_of_a_new_run_says_that_there_is_nothing_yet(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run.root)]) == 0

    out = capsys.readouterr().out
    assert "no weights published" in out
    assert "no instance has registered" in out


def test_inspect_shows_a_damaged_version_beside_sound_ones(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    publish_full(run, 0)
    manifest = publish_full(run, 1)
    (run.weights_version(0) / "manifest.json").write_text("{")

    assert main(["inspect", str(run.root)]) == 0

    out = capsys.readouterr().out
    assert "damaged" in out
    assert manifest.digest in out


def test_verify_of_a_sound_version_succeeds(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    publish_full(run, 0)
    publish_full(run, 1)

    assert main(["verify", str(run.root)]) == 0

    assert "version 1: 5 tensors in 3 files" in capsys.readouterr().out


def test_verify_names_the_damaged_tensor_and_fails(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    entry = publish_full(run, 1).tensors["model.embed"]
    with (run.weights_version(1) / entry.file).open("r+b") as file:
        file.seek(entry.offset + 5)
        byte = file.read(1)[0]
        file.seek(entry.offset + 5)
        file.write(bytes([byte ^ 8]))

    assert main(["verify", str(run.root), "1"]) == 1

    out = capsys.readouterr().out
    assert "tensor model.embed in model.safetensors" in out
    assert "1 faults" in out


@pytest.mark.parametrize("arguments", [["verify"], ["verify", "7"], ["diff", "7", "8"]])
def test_a_version_that_does_not_exist_is_an_error(
    run: RunDir, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = arguments

    assert main([command, str(run.root), *rest]) == 1

    assert "error: " in capsys.readouterr().err


def test_a_directory_without_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 1

    assert "holds no run" in capsys.readouterr().err


def test_diff_lists_changed_tensors_with_their_largest_difference(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = small_tensors()
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["model.embed"][2, 1] += 0.5
    after["model.new"] = torch.ones(2)
    publish_full(run, 0, before)
    publish_full(run, 1, after)

    assert main(["diff", str(run.root), "0", "1"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["model.embed", "24", "1", "5.000e-01"] for line in lines)
    assert any("model.new" in line and "only in version 1" in line for line in lines)
    assert "2 of 6 tensors differ between 0 and 1" in lines


def test_diff_of_equal_versions_says_so(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    publish_full(run, 0, small_tensors())
    publish_full(run, 1, small_tensors())

    assert main(["diff", str(run.root), "0", "1"]) == 0

    assert capsys.readouterr().out.strip() == "0 of 5 tensors differ between 0 and 1"
