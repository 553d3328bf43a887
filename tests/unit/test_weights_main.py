"""`python -m stages.weights`: what people see."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.sections import WeightsConfig
from launch import truth
from launch.runs import Folder
from launch.truth import Truth
from stages.rundir import RunDir
from stages.weights import __main__ as tool
from stages.weights.__main__ import main
from stages.weights.apply import write_nack, write_prepared
from stages.weights.records import Nack, RefreshRequest
from stages.weights.refresh import request_refresh
from stages.weights.report import inspect_lines
from tests.delta_kit import flip_last_byte, payload_file, publish_chain
from tests.made_runs import made
from tests.weights_kit import (
    INSTANCES,
    Answers,
    as_writer,
    make_context,
    make_source,
    publish_full,
    register,
    small_tensors,
)


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
    refreshed = next(line for line in lines if "0.125" in line)
    assert "rollout_001 on node1" in refreshed
    assert refreshed.split()[-6:] == ["2.000", "0.000", "0.000", "0.200", "0.050", "0.100"]


@pytest.mark.parametrize(
    ("is_over", "wanted"),
    [
        (False, {"rollout_000": "stopping", "rollout_001": "ready"}),
        (True, {"rollout_000": "stopped", "rollout_001": "gone,"}),
    ],
)
def test_inspect_says_of_instances_of_a_run_that_is_over_that_they_are_not_there(
    run: RunDir, is_over: bool, wanted: dict[str, str]
) -> None:
    register(run, "rollout_000", state="stopping")
    register(run, "rollout_001", state="ready")

    lines = inspect_lines(run, {}, is_over=is_over)

    assert {line.split()[0]: line.split()[1] for line in lines if line.startswith("rollout")} == wanted


def test_inspect_finds_the_server_that_somebody_started_of_a_run_that_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "over", "succeeded", mode="local")
    register(run, "rollout_000", state="ready")
    register(run, "rollout_001", state="ready")
    beats = itertools.count()
    monkeypatch.setattr(truth, "LOOK_S", 0.05)
    monkeypatch.setattr(truth, "LOOK_PAUSE_S", 0.01)
    monkeypatch.setattr(truth, "_counters", lambda _folder: {"": 7, "rollout_000": next(beats), "rollout_001": 3})

    assert main(["inspect", str(run.root)]) == 0

    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("rollout")}
    assert " ready " in lines["rollout_000"]
    assert ", moves" in lines["rollout_000"]
    assert "gone, was ready" in lines["rollout_001"]


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


@pytest.mark.parametrize("arguments", [["verify", "2"], ["diff", "2", "4"], ["diff", "4", "2"], ["export", "2"]])
def test_who_asks_for_a_version_that_was_collected_hears_which_there_are(
    run: RunDir, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for version in (3, 4):
        publish_full(run, version)
    command, *rest = arguments
    more = [str(tmp_path / "export")] if command == "export" else []

    assert main([command, str(run.root), *rest, *more]) == 1

    said = capsys.readouterr().err
    assert "version 2 is not published" in said
    assert "published are 3, 4" in said
    assert "weights.keep_versions" in said


def test_a_directory_without_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2

    assert "is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["diff", "0", "1"], ["push", "folder"]])
def test_a_half_deleted_run_is_named_as_such(
    run: RunDir, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run.run_json.unlink()

    assert main([command[0], str(run.root), *command[1:]]) == 2

    assert "is half-deleted: run.json (missing)" in capsys.readouterr().err


def test_inspect_tells_who_published_a_version_in_which_attempt(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_full(run, 0)
    run.start_attempt(1)
    publish_full(replace(run, attempt=1, writer="push"), 1)

    assert main(["inspect", str(run.root)]) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:3] for row in rows if row and row[0] in ("0", "1")] == [["0", "0", "trainer"], ["1", "1", "push"]]


def test_inspect_tells_who_has_not_answered_a_request_and_who_refused(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = publish_full(run, 1)
    request = RefreshRequest(
        1, "weights/v000001", manifest.digest, "inplace", "parallel", (*INSTANCES, "rollout_002"), 60.0, 0.0
    )
    run.write(run.request_json(1), request.to_record())
    write_prepared(run, Answers(run, manifest).prepared(INSTANCES[0]))
    write_nack(run, Nack(INSTANCES[1], 1, manifest.digest, "prepare", "no room", 0))

    assert main(["inspect", str(run.root)]) == 0

    out = capsys.readouterr().out
    assert "asked for version 1 (inplace, within 60 s): rollout_000: prepared" in out
    assert "rollout_001: refused (prepare): no room; rollout_002: no answer yet" in out


@pytest.mark.parametrize("content", ["{", "[]", '{"run_id": 1}'])
def test_inspect_goes_on_beside_damaged_records(run: RunDir, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = publish_full(run, 1)
    register(run, INSTANCES[0], version=1, manifest_digest=manifest.digest)
    damaged = (run.latest_json, run.instance_json(INSTANCES[1]), run.request_json(1), run.refreshed_json(1))
    for path in damaged:
        path.write_text(content)
    (run.weights / "v000002").write_text("a file, no folder")
    (run.requests / "v1x.json").write_text("")

    assert main(["inspect", str(run.root)]) == 0

    out = capsys.readouterr().out
    assert "LATEST.json" in out
    assert "published are 1, 2" in out
    assert any(line.startswith("rollout_000") and manifest.digest in line for line in out.splitlines())


def test_inspect_tells_of_a_pointer_to_a_version_that_is_gone(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    publish_full(run, 1)
    shutil.rmtree(run.weights_version(1))

    assert main(["inspect", str(run.root)]) == 0

    assert "LATEST.json names version 1, which does not exist" in capsys.readouterr().out


def test_verify_without_pointer_tells_which_versions_there_are(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    publish_full(run, 1)
    run.latest_json.unlink()

    assert main(["verify", str(run.root)]) == 1

    assert "LATEST.json is missing or of another run; published are 1" in capsys.readouterr().err


def test_versions_may_be_named_like_their_folders(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    publish_full(run, 1)

    assert main(["verify", str(run.root), "v000001"]) == 0

    assert "version 1: " in capsys.readouterr().out


@pytest.mark.parametrize("state", ["running", "starting", "requeued"])
def test_push_is_refused_while_a_trainer_lives_or_will_come(
    run: RunDir, state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "tell_one", lambda root: Truth(Folder.at(root), state))

    assert main(["push", str(run.root), "folder", "--no-trainer"]) == 2

    assert f"is {state}: its trainer publishes the versions; push when the run is over" in capsys.readouterr().err
    assert run.published_versions() == []


def test_push_is_refused_while_nobody_can_tell_whether_a_trainer_lives(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run.root), "folder"]) == 2

    assert "add --no-trainer when you know that none does" in capsys.readouterr().err


def test_push_into_a_run_without_configuration_is_refused(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(run.root), "folder", "--no-trainer"]) == 2

    assert "config.yaml cannot be read" in capsys.readouterr().err


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
    assert "1 of 95 elements differ (1.05%)" in lines


def test_diff_names_small_files_that_differ(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_source(tmp_path / "model")
    publish_full(run, 0, small_tensors(), source=source)
    (source / "tokenizer.json").write_text("another")
    (source / "vocab.json").write_text("{}")
    publish_full(run, 1, small_tensors(), source=source)

    assert main(["diff", str(run.root), "0", "1"]) == 0

    out = capsys.readouterr().out
    assert "file tokenizer.json: 17 bytes became 7, or other ones" in out
    assert "file vocab.json: only in version 1" in out


def test_diff_of_a_tensor_that_became_not_a_number_says_nan(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    after = small_tensors()
    after["model.embed"] = after["model.embed"].clone()
    after["model.embed"][0, 0] = float("nan")
    publish_full(run, 0, small_tensors())
    publish_full(run, 1, after)

    assert main(["diff", str(run.root), "0", "1"]) == 0

    assert any(line.split() == ["model.embed", "24", "1", "nan"] for line in capsys.readouterr().out.splitlines())


def test_diff_of_equal_versions_says_so(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    publish_full(run, 0, small_tensors())
    publish_full(run, 1, small_tensors())

    assert main(["diff", str(run.root), "0", "1"]) == 0

    assert capsys.readouterr().out.strip() == "0 of 5 tensors differ between 0 and 1"


# ---- deltas ----------------------------------------------------------------------------------------------------------


def test_inspect_verify_and_diff_understand_deltas(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    manifests, published = publish_chain(run, 3)
    changed = sum(int((published[1][name] != published[2][name]).sum()) for name in published[2])

    assert main(["inspect", str(run.root)]) == 0
    assert main(["verify", str(run.root)]) == 0
    assert main(["diff", str(run.root), "1", "2"]) == 0

    out = capsys.readouterr().out
    assert any(manifests[2].digest in line and line.endswith("newest delta of 1") for line in out.splitlines())
    assert "version 2: 4 tensors in 3 files" in out
    assert "(and of version 1, its base)" in out
    assert "all digests match" in out
    assert "2 of 4 tensors differ between 1 and 2" in out
    assert f"{changed:,} of " in out
    assert "delta-0" not in out


def test_verify_of_a_delta_names_damage_of_its_own_and_of_its_bases(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_chain(run, 3)
    flip_last_byte(payload_file(run, 1))

    assert main(["verify", str(run.root), "2"]) == 1

    out = capsys.readouterr().out
    assert "as version 1 changes it" in out
    assert "1 faults" in out


@pytest.mark.parametrize("max_file_bytes", [4e9, 2e4])
def test_an_export_is_what_would_have_been_published_in_full(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], max_file_bytes: float
) -> None:
    _, published = publish_chain(run, 3, max_file_bytes=max_file_bytes)
    other = RunDir.create(tmp_path / "other")
    publish_full(other, 2, published[2], WeightsConfig(dtype="float32", max_file_bytes=max_file_bytes))

    assert main(["export", str(run.root), "2", str(tmp_path / "mine")]) == 0

    assert "version 2 is in" in capsys.readouterr().out
    wanted = {path.name: path.read_bytes() for path in other.weights_version(2).iterdir()}
    del wanted["manifest.json"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == wanted


def test_an_export_replaces_nothing(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish_chain(run, 1)

    assert main(["export", str(run.root), "0", str(tmp_path)]) == 1

    assert "exists; choose another folder" in capsys.readouterr().err
