"""Old checkpoints go, never the last good one; people see what there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stages.checkpoint import __main__ as command
from stages.checkpoint import newest
from stages.checkpoint.collect import collect_checkpoints, set_aside
from stages.checkpoint.errors import (
    DamagedCheckpointError,
)
from stages.rundir import RunDir
from tests.checkpoint_files import damage, save_one
from tests.weights_kit import as_writer


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), "trainer")


# ---- collecting --------------------------------------------------------------------------------------------------


def test_the_newest_few_are_kept(run: RunDir) -> None:
    for step in (1, 2, 3, 4):
        save_one(run, step)

    assert sorted(collect_checkpoints(run, keep=2)) == [1, 2]
    assert sorted(os.listdir(run.checkpoints)) == ["step_000003", "step_000004"]


def test_the_last_good_one_stays_however_many_damaged_ones_are_newer(run: RunDir) -> None:
    for step in (1, 2, 3):
        save_one(run, step)
    for step in (2, 3):
        (run.checkpoint(step) / "rank_00000.safetensors").unlink()

    assert collect_checkpoints(run, keep=1) == ()
    assert 1 in run.published_checkpoints()


def test_what_lies_beyond_is_set_aside_and_goes_when_a_newer_one_is_there(run: RunDir) -> None:
    for step in (1, 2, 3):
        save_one(run, step)

    assert set_aside(run, newer_than=1) == (2, 3)
    found = newest(run)
    assert found is not None
    assert found.step == 1
    collect_checkpoints(run, keep=2)
    assert sorted(os.listdir(run.checkpoints)) == ["damaged_step_000002", "damaged_step_000003", "step_000001"]
    save_one(run, 3)
    collect_checkpoints(run, keep=2)
    assert sorted(os.listdir(run.checkpoints)) == ["damaged_step_000003", "step_000001", "step_000003"]


# ---- for people --------------------------------------------------------------------------------------------------


def test_the_command_lists_every_checkpoint_and_reads_every_byte(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        save_one(run, step)
    damage(run.checkpoint(2) / "rank_00000.safetensors")
    (run.checkpoint(3) / "rank_00000.safetensors").unlink()

    assert command.main([str(run.root)]) == 1

    third, second, first = capsys.readouterr().out.splitlines()
    assert "step_000003 is damaged: rank_00000.safetensors is missing" in third
    assert second.startswith("step 2: ")
    assert "xxh3-128 of rank_00000.safetensors is" in second
    assert first.endswith("by attempt 0, tp 1 dp 1 bfloat16 LlamaForCausalLM: verified")


def test_the_quick_command_looks_at_sizes_only(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    save_one(run, 2)
    damage(run.checkpoint(2) / "rank_00000.safetensors")

    assert command.main([str(run.root), "--quick"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("sizes are right")


def test_the_command_on_a_folder_that_is_no_run_or_has_none(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(run.root / "attempts")]) == 2
    assert command.main([str(run.root)]) == 0
    printed = capsys.readouterr()
    assert "holds no run" in printed.err
    assert "has no checkpoint" in printed.out


def test_a_damaged_checkpoint_error_travels_between_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(DamagedCheckpointError("step_000001", "it is gone")))

    assert str(error) == "checkpoint step_000001 is damaged: it is gone"
