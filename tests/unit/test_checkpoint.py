"""Checkpoints as files: several ranks save one, a sound one is found and loaded, a damaged one is passed over by name."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from stages.checkpoint import Checkpoint, newest
from stages.checkpoint import __main__ as command
from stages.checkpoint.collect import collect_checkpoints, set_aside
from stages.checkpoint.errors import (
    DamagedCheckpointError,
    LayoutMismatchError,
    LoadError,
    ModelMismatchError,
    NoCheckpointSpaceError,
    NoSoundCheckpointError,
    SaveError,
    TaskMismatchError,
)
from stages.checkpoint.find import read, verify
from stages.checkpoint.load import load_newest, steps_to_try
from stages.checkpoint.manifest import Fingerprint, Layout
from stages.checkpoint.save import save
from stages.checkpoint.tensors import CHUNK_BYTES, read_tensors, write_tensors
from stages.rundir import FencedError, RunDir
from stages.weights.ranks import RankGroup, SingleRank
from tests.weights_kit import as_writer, run_ranks

TWO_RANKS = Layout(tp=1, dp=2, world_size=2, dtype="bfloat16")
ONE_RANK = Layout(tp=1, dp=1, world_size=1, dtype="bfloat16")
MODEL = Fingerprint("LlamaForCausalLM", "config-digest", "tokenizer-digest", "task-digest")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), "trainer")


def state(rank: int, step: int = 1) -> dict[str, torch.Tensor]:
    """Every number format, an empty tensor, a scalar, and sizes that are no multiple of 8 bytes."""
    draw = torch.Generator().manual_seed(100 * step + rank)  # ranks are threads here
    return {
        "param.a": torch.randn(7, generator=draw).bfloat16(),
        "master.a": torch.randn(7, generator=draw),
        "exp_avg.b": torch.randn(3, 5, generator=draw),
        "empty": torch.empty(0),
        "adam.step": torch.tensor(float(step), dtype=torch.float64),
        "rng.torch": torch.randint(0, 255, (13,), dtype=torch.uint8, generator=draw),
        "rng.python": torch.randint(-(2**40), 2**40, (4,), dtype=torch.int64, generator=draw),
    }


def blank(rank: int = 0) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state(rank).items()}


def save_one(run: RunDir, step: int, **changes: Any) -> Checkpoint:
    options = {"tensors": state(0, step), "layout": ONE_RANK, "model": MODEL, "step_s": 1.5, "ranks": SingleRank()}
    return save(run, step=step, **{**options, **changes})


def save_two(run: RunDir, step: int, tensors: Callable[[int], dict[str, torch.Tensor]] = state) -> list[Future[Any]]:
    def body(ranks: RankGroup) -> Checkpoint:
        return save(run, step=step, tensors=tensors(ranks.rank), layout=TWO_RANKS, model=MODEL, step_s=0.0, ranks=ranks)

    return run_ranks(2, body)


def load_one(run: RunDir, **changes: Any) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    into: dict[str, torch.Tensor] = changes.pop("into", blank())
    options: dict[str, Any] = {"layout": ONE_RANK, "model": MODEL, "ranks": SingleRank(), **changes}
    return load_newest(run, steps_to_try(run, options["ranks"]), into=into, **options), into


def damage(path: Path) -> None:
    """Change the last byte, and nothing of the size."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- saving ------------------------------------------------------------------------------------------------------


def test_every_rank_finds_its_own_tensors_again(run: RunDir) -> None:
    saved = [future.result() for future in save_two(run, 3)]

    assert saved[0] == saved[1]
    for rank in range(2):
        into = blank(rank)
        entry = saved[0].manifest.files[f"rank_0000{rank}.safetensors"]
        read_tensors(saved[0].rank_path(rank), entry, into)
        assert same(into, state(rank))


def test_the_files_are_safetensors_and_the_digest_is_that_of_the_whole_file(run: RunDir) -> None:
    checkpoint = save_one(run, 2)

    path = checkpoint.rank_path(0)
    assert same(load_file(path), state(0, 2))
    entry = checkpoint.manifest.files[path.name]
    assert (entry.bytes, entry.xxh3_128) == (path.stat().st_size, xxhash.xxh3_128_hexdigest(path.read_bytes()))


def test_the_manifest_says_what_it_took_and_what_it_fits(run: RunDir) -> None:
    save_one(run, 2)

    record = json.loads((run.checkpoint(2) / "manifest.json").read_text())

    assert record["layout"] == {"tp": 1, "dp": 1, "world_size": 1, "dtype": "bfloat16"}
    assert (record["step"], record["version"], record["step_s"], record["attempt"]) == (2, 2, 1.5, 0)
    assert record["save_s"] > 0
    assert record["model"] == vars(MODEL)


def test_a_failure_on_one_rank_fails_on_all_and_leaves_the_older_checkpoint_and_nothing_else(run: RunDir) -> None:
    save_two(run, 1)

    def broken(rank: int) -> dict[str, torch.Tensor]:
        return state(rank) if rank == 0 else {"strange": torch.zeros(3, dtype=torch.complex64)}

    futures = save_two(run, 2, broken)

    for future in futures:
        with pytest.raises(
            SaveError, match=r"trainer rank 1 of 2: ValueError: tensor strange has dtype torch\.complex64"
        ):
            future.result()
    assert os.listdir(run.checkpoints) == ["step_000001"]


def test_a_full_disk_is_told_before_anything_is_written(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    save_one(run, 1)
    full = os.statvfs_result((4096, 4096, 10, 10, 10, 10, 10, 10, 0, 255))
    monkeypatch.setattr("stages.checkpoint.save.os.statvfs", lambda path: full)

    with pytest.raises(NoCheckpointSpaceError, match=r"wanted 1,0.* available 40,960 .*lower keep_latest_checkpoints"):
        save_one(run, 2)
    assert os.listdir(run.checkpoints) == ["step_000001"]


def test_a_disk_that_fills_up_while_one_rank_writes_stops_all(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    save_two(run, 1)
    write = os.write

    def write_some(fd: int, data: bytes | memoryview) -> int:
        if "rank_00001" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "no space left")
        return write(fd, data)

    monkeypatch.setattr("stages.checkpoint.tensors.os.write", write_some)
    futures = save_two(run, 2)

    for future in futures:
        with pytest.raises(NoCheckpointSpaceError, match=r"step_000002\.tmp"):
            future.result()
    assert os.listdir(run.checkpoints) == ["step_000001"]
    monkeypatch.undo()
    verify(read(run, 1))


def test_a_writer_of_an_older_attempt_is_fenced_out(run: RunDir) -> None:
    run.start_attempt(1)

    with pytest.raises(FencedError):
        save_one(run, 1)
    assert os.listdir(run.checkpoints) == []


def test_what_a_killed_rank_left_of_a_checkpoint_is_swept_by_the_next_attempt(run: RunDir) -> None:
    left = run.checkpoints / ".step_000009.tmp-0-0a0b0c0d"
    left.mkdir()
    (left / "rank_00000.safetensors").write_bytes(b"half")
    run.start_attempt(1)

    save_one(RunDir.open(run.root, writer="trainer"), 1)

    assert os.listdir(run.checkpoints) == ["step_000001"]


@given(sizes=st.lists(st.integers(0, 40), max_size=6), chunk=st.integers(1, 64))
def test_any_sizes_survive_the_file_in_chunks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], chunk: int
) -> None:
    tensors = {f"t{index}": torch.randn(size) for index, size in enumerate(sizes)}
    path = tmp_path_factory.mktemp("any") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.checkpoint.tensors.CHUNK_BYTES", chunk)
        entry = write_tensors(path, tensors)
        into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        read_tensors(path, entry, into)

    assert same(into, tensors)
    assert same(load_file(path), tensors)
    assert CHUNK_BYTES == 32 << 20


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
