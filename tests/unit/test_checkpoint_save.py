"""Several ranks save a checkpoint: all of it or nothing, whatever fails."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from stages.checkpoint.errors import (
    NoCheckpointSpaceError,
    SaveError,
)
from stages.checkpoint.find import read, verify
from stages.checkpoint.tensors import read_tensors, write_tensors
from stages.rundir import FencedError, RunDir
from tests.checkpoint_files import MODEL, blank, same, save_one, save_two, state
from tests.weights_kit import as_writer


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), "trainer")


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
