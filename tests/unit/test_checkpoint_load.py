"""A sound checkpoint is found and loaded, a damaged one passed over by name, one that does not fit refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.checkpoint import newest
from stages.checkpoint.errors import (
    LayoutMismatchError,
    LoadError,
    ModelMismatchError,
    NoSoundCheckpointError,
    TaskMismatchError,
)
from stages.checkpoint.load import load_newest, steps_to_try
from stages.checkpoint.manifest import Fingerprint, Layout
from stages.rundir import RunDir
from stages.weights.ranks import RankGroup
from tests.checkpoint_files import MODEL, TWO_RANKS, blank, damage, load_one, same, save_one, save_two, state
from tests.weights_kit import as_writer, run_ranks


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), "trainer")


# ---- finding -----------------------------------------------------------------------------------------------------


def test_a_run_without_checkpoints_has_none(run: RunDir) -> None:
    assert newest(run) is None


def test_the_newest_is_found_by_its_commit_record(run: RunDir) -> None:
    save_one(run, 9)
    save_one(run, 10)
    (run.checkpoints / "step_000011").mkdir()  # a folder without one is no checkpoint

    warnings: list[str] = []
    found = newest(run, warnings.append)

    assert found is not None
    assert (found.step, found.attempt) == (10, 0)
    assert warnings == [
        "warning: checkpoint checkpoints/step_000011 is damaged: it has no manifest.json of this run; looking for an older one"
    ]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: (path / "rank_00000.safetensors").unlink(), "rank_00000.safetensors is missing"),
        (lambda path: os.truncate(path / "rank_00000.safetensors", 10), "is 10 bytes, its manifest says"),
        (lambda path: (path / "manifest.json").write_text("{"), "is not JSON"),
        (lambda path: edit_manifest(path, step=3), "its manifest is of step 3"),
        (lambda path: edit_manifest(path, files={}), "wanted one for each rank"),
        (lambda path: edit_manifest(path, format=2), "reads format 1"),
        (lambda path: edit_manifest(path, run_id="another"), "no manifest.json of this run"),
    ],
)
def test_damage_that_can_be_seen_without_reading_leads_to_the_older_one(
    run: RunDir, spoil: Callable[[Path], None], problem: str
) -> None:
    save_one(run, 1)
    save_one(run, 2)
    spoil(run.checkpoint(2))

    warnings: list[str] = []
    found = newest(run, warnings.append)

    assert found is not None
    assert found.step == 1
    assert len(warnings) == 1
    assert "step_000002" in warnings[0]
    assert problem in warnings[0]


def edit_manifest(path: Path, **changes: Any) -> None:
    record = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**record, **changes}))


def test_looking_for_checkpoints_loads_no_torch() -> None:
    code = "import sys, stages.checkpoint, stages.checkpoint.over; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.strip() == "False"


# ---- loading -----------------------------------------------------------------------------------------------------


def test_the_newest_sound_one_is_loaded_and_the_damaged_one_named(run: RunDir) -> None:
    for step in (1, 2, 3):
        save_one(run, step)
    damage(run.checkpoint(3) / "rank_00000.safetensors")

    warnings: list[str] = []
    checkpoint, into = load_one(run, tell=warnings.append)

    assert checkpoint.step == 2
    assert same(into, state(0, 2))
    assert [warning.split(" is ")[0] for warning in warnings] == ["warning: checkpoint step_000003"]


def test_damage_that_one_rank_sees_is_passed_over_by_all(run: RunDir) -> None:
    save_two(run, 1)
    save_two(run, 2, lambda rank: state(rank, 2))
    damage(run.checkpoint(2) / "rank_00001.safetensors")

    def body(ranks: RankGroup) -> tuple[int, bool]:
        into = blank(ranks.rank)
        steps = steps_to_try(run, ranks)
        found = load_newest(run, steps, into=into, layout=TWO_RANKS, model=MODEL, ranks=ranks, tell=lambda _: None)
        return found.step, same(into, state(ranks.rank, 1))

    assert [future.result() for future in run_ranks(2, body)] == [(1, True), (1, True)]


def test_when_none_is_sound_the_run_does_not_start_over(run: RunDir) -> None:
    save_one(run, 1)
    damage(run.checkpoint(1) / "rank_00000.safetensors")

    with pytest.raises(NoSoundCheckpointError, match=r"step_000001.*move .*checkpoints away"):
        load_one(run, tell=lambda _: None)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(1, 4, 4, "bfloat16"), "wanted 4 ranks of train_tp_size 1, available 1 ranks .*set train_gpus=1"),
        (Layout(2, 1, 2, "bfloat16"), "wanted 2 ranks of train_tp_size 2, available 1 ranks of train_tp_size 1"),
        (Layout(1, 1, 1, "float32"), "wanted float32, available bfloat16; set train_dtype=bfloat16"),
    ],
)
def test_another_layout_is_refused_with_the_options_to_change(run: RunDir, layout: Layout, message: str) -> None:
    save_one(run, 1)

    with pytest.raises(LayoutMismatchError, match=message):
        load_one(run, layout=layout)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Fingerprint("Qwen2ForCausalLM", "x", "tokenizer-digest", "task-digest"), ModelMismatchError, "set model_path"),
        (Fingerprint("LlamaForCausalLM", "config-digest", "", "task-digest"), ModelMismatchError, "wanted none"),
        (
            Fingerprint("LlamaForCausalLM", "config-digest", "tokenizer-digest", "x"),
            TaskMismatchError,
            "task.params and seed",
        ),
    ],
)
def test_another_model_tokenizer_or_task_is_refused(
    run: RunDir, model: Fingerprint, error: type[Exception], message: str
) -> None:
    save_one(run, 1)

    with pytest.raises(error, match=message):
        load_one(run, model=model)


def test_other_tensors_than_the_optimizer_has_are_refused_by_name(run: RunDir) -> None:
    save_one(run, 1)

    with pytest.raises(LayoutMismatchError, match=r"tensor exp_avg.b .*wanted F32 \[3, 6\].*available F32 \[3, 5\]"):
        load_one(run, into={**blank(), "exp_avg.b": torch.zeros(3, 6)})


def test_a_mistake_of_this_program_is_not_taken_for_damage(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("no such stream")

    save_one(run, 1)
    monkeypatch.setattr("stages.checkpoint.load.read_tensors", fail)

    with pytest.raises(LoadError, match="trainer rank 0 of 1: RuntimeError: no such stream"):
        load_one(run)
