"""Run directories of which something is missing or damaged, folders that are none, and how runs are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launch.runs import NotARunError, find_runs
from launch.truth import tell_one
from tests.fake_slurm import FakeSlurm, Job, beating, short_looks, slurm_in_memory
from tests.made_runs import CAUSE, made, new_run, saved, take_away, trained

__all__ = ["short_looks", "slurm_in_memory"]
pytestmark = pytest.mark.usefixtures("slurm_in_memory", "short_looks")


# ---- half-deleted --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "config.yaml",
        "plan.json",
        "desired.json",
        "weights",
        "ledger",
        "attempts/0/logs",
        "weights/LATEST.json",
    ],
)
def test_a_finished_run_without_one_of_its_files_is_half_deleted_and_the_file_is_named(
    tmp_path: Path, name: str
) -> None:
    run = made(tmp_path / "run", "succeeded")
    trained(run, 3)
    run.write(run.summary_json, {"steps": 3})
    take_away(run, name)

    found = tell_one(run.root)

    assert (found.state, found.was, found.exit_code) == ("half-deleted", "succeeded", 1)
    assert any(entry.startswith(name) for entry in found.damage)


@pytest.mark.parametrize("name", ["run.json", "attempts/0/state.json", "plan.json", "desired.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "\xff\xfe"])
def test_a_damaged_record_is_named(tmp_path: Path, name: str, content: str) -> None:
    run = made(tmp_path / "run", "succeeded")
    (run.root / name).write_bytes(content.encode("latin-1"))

    found = tell_one(run.root)

    assert found.state == "half-deleted"
    assert f"{name} (damaged)" in found.damage


def test_a_state_that_was_deleted_is_missed_because_its_events_are_there(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "succeeded")
    take_away(run, "attempts/0/state.json")

    found = tell_one(run.root)

    assert found.state == "half-deleted"
    assert "attempts/0/state.json (missing)" in found.damage


@pytest.mark.parametrize("name", ["attempts/0/state.json", "attempts"])
def test_a_run_whose_last_word_was_taken_away_is_not_said_to_have_left_none(tmp_path: Path, name: str) -> None:
    run = made(tmp_path / "run", "succeeded")
    trained(run, 3)
    take_away(run, name)

    found = tell_one(run.root)

    assert (found.state, found.was) == ("half-deleted", "")
    assert found.why == "the record that would say how it ended is not there"


def test_weights_that_the_newest_version_needs_are_missed(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "succeeded")
    trained(run, 3)
    run.write(run.summary_json, {"steps": 3, "checkpoint": "weights/v000003"})
    take_away(run, "weights/v000003")

    assert tell_one(run.root).damage == ("weights/v000003 (missing)",)


def test_what_is_left_without_run_json_is_still_recognised(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "failed", cause=CAUSE)
    take_away(run, "run.json", "attempts")

    found = tell_one(run.root)

    assert found.state == "half-deleted"
    assert "run.json (missing)" in found.damage


def test_a_running_run_with_a_missing_file_runs_and_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm_in_memory: FakeSlurm
) -> None:
    run = made(tmp_path / "run", "running")
    take_away(run, "batches")
    beating(run, monkeypatch)
    slurm_in_memory.jobs[41] = Job("RUNNING")

    found = tell_one(run.root)

    assert (found.state, found.damage) == ("running", ("batches/ (missing)",))


def test_a_whole_run_has_no_damage(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "succeeded")
    trained(run, 3)
    saved(run, 2)
    run.write(run.summary_json, {"steps": 3, "checkpoint": str(run.weights_version(3))})

    assert tell_one(run.root).damage == ()


# ---- no run --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no such folder"),
        (lambda path: path.write_text(""), "it is a file"),
        (lambda path: path.mkdir(), "no run.json"),
        (lambda path: new_run(path / "first"), "runs below it are"),
    ],
)
def test_what_is_no_run_is_refused_with_what_it_is(tmp_path: Path, make: Callable[[Path], None], words: str) -> None:
    make(tmp_path / "it")

    with pytest.raises(NotARunError, match=words):
        tell_one(tmp_path / "it")


def test_another_layout_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.run_json.write_text('{"schema_version": 99, "run_id": "x"}')

    with pytest.raises(NotARunError, match="has layout 99"):
        tell_one(run.root)


def test_runs_are_found_below_a_folder_and_not_inside_each_other(tmp_path: Path) -> None:
    for name in ("one", "sweep/0_a", "sweep/1_b"):
        new_run(tmp_path / name)
    new_run(tmp_path / "one" / "batches" / "inside")
    (tmp_path / "notes").mkdir()

    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["one", "sweep/0_a", "sweep/1_b"]
