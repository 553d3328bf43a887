"""Batches as files: what is written comes back, what is damaged is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from stages.batches import TENSORS_FILE, Batch, BatchError, Sequence, read_batch, write_batch
from stages.rundir import RunDir


def example() -> Batch:
    return Batch.pack(
        [
            Sequence.of_completion(
                [5, 6], [7, 8, 9], [-0.1, -2.0, 0.0], [3, 3, 4], reward=1.0, advantage=0.5, group_id=0
            ),
            Sequence.of_completion([5, 6], [1], [-1.5], [4], reward=0.0, advantage=-0.5, group_id=0),
        ]
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rows: list[Sequence] = []
    for group in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6))
        n = draw(st.integers(0 if rows else 1, 6))
        finite = st.floats(-1e4, 0.0, width=32)
        rows.append(
            Sequence.of_completion(
                prompt,
                draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)),
                draw(st.lists(finite, min_size=n, max_size=n)),
                draw(st.lists(st.integers(0, 1000), min_size=n, max_size=n)),
                reward=draw(st.floats(-10, 10, width=32)),
                advantage=draw(st.floats(-10, 10, width=32)),
                group_id=group,
            )
        )
    return Batch.pack(rows)


def test_packing_puts_sequences_end_to_end() -> None:
    batch = example()

    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 5, 6, 1]
    assert batch.cu_seqlens.tolist() == [0, 5, 8]
    assert batch.versions.tolist() == [-1, -1, 3, 3, 4, -1, -1, 4]
    assert (batch.num_response_tokens, batch.oldest_version, batch.newest_version) == (4, 3, 4)


@given(batch=batches())
def test_a_written_batch_is_read_back_bit_for_bit(batch: Batch, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = RunDir.create(tmp_path_factory.mktemp("batches") / "run")

    write_batch(run, 12, batch, generate_s=1.5)
    found = read_batch(run, 12)

    assert found is not None
    again, manifest = found
    assert all(np.array_equal(getattr(batch, f.name), getattr(again, f.name)) for f in fields(Batch))
    assert manifest.extra["generate_s"] == 1.5
    assert manifest.response_tokens == batch.num_response_tokens


def test_a_batch_that_is_not_published_is_none(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    write_batch(run, 1, example())

    assert read_batch(run, 0) is None


def test_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    write_batch(run, 0, example())
    path = run.batch(0) / TENSORS_FILE
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)

    with pytest.raises(BatchError, match="damaged"):
        read_batch(run, 0)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    write_batch(run, 0, example())
    path = run.batch(0) / TENSORS_FILE
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(BatchError, match="bytes, its manifest says"):
        read_batch(run, 0)


def test_a_missing_tensor_file_is_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    write_batch(run, 0, example())
    (run.batch(0) / TENSORS_FILE).unlink()

    with pytest.raises(BatchError, match="missing"):
        read_batch(run, 0)


def test_a_manifest_of_another_step_is_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    write_batch(run, 0, example())
    run.batch(0).rename(run.batch(1))

    with pytest.raises(BatchError, match="step"):
        read_batch(run, 1)


def test_a_file_with_other_tensors_is_refused_even_when_its_digest_is_right(tmp_path: Path) -> None:
    import xxhash

    run = RunDir.create(tmp_path / "run")
    write_batch(run, 0, example())
    path = run.batch(0) / TENSORS_FILE
    tensors = load_file(path)
    del tensors["advantages"]
    save_file(tensors, path)
    manifest = run.manifest(run.batch(0))
    assert manifest is not None
    data = path.read_bytes()
    run.write(
        run.batch(0) / "manifest.json", {**manifest, "bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    )

    with pytest.raises(BatchError, match="holds"):
        read_batch(run, 0)


def broken(name: str, index: int, value: float) -> dict[str, Any]:
    array = getattr(example(), name).copy()
    array[index] = value
    return {name: array}


@pytest.mark.parametrize(
    "change, rule",
    [
        (broken("cu_seqlens", 0, 1), "cu_seqlens"),
        (broken("cu_seqlens", 1, 8), "not empty"),
        (broken("cu_seqlens", 2, 7), "wanted"),
        (broken("token_ids", 2, -1), "token_ids"),
        (broken("loss_mask", 2, 2), "only 0 and 1"),
        (broken("loss_mask", 5, 1), "no context"),
        (broken("behaviour_logprobs", 2, np.nan), "finite"),
        (broken("behaviour_logprobs", 2, 0.5), "at most 0"),
        (broken("behaviour_logprobs", 0, -0.5), "must be 0 where"),
        (broken("versions", 2, -1), "0 or more"),
        (broken("versions", 0, 3), "must be -1"),
        (broken("advantages", 0, np.inf), "finite"),
        ({"rewards": np.zeros(2, np.float64)}, "float64"),
        ({"loss_mask": np.zeros(8, np.uint8)}, "generated token"),
    ],
)
def test_a_batch_that_breaks_a_rule_cannot_be_made(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(BatchError, match=rule):
        replace(example(), **change)


def test_a_sequence_whose_parts_differ_in_length_is_refused_by_name() -> None:
    with pytest.raises(BatchError, match="sequence 0: behaviour_logprobs"):
        Batch.pack([Sequence([1, 2], [0, 1], [0.0], [-1, 0], reward=0.0, advantage=0.0, group_id=0)])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(BatchError, match="at least one"):
        Batch.pack([])
