"""A version whose snapshot lies in its files from the start: what it holds, what is kept of it, what a failure leaves."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.rundir import RunDir
from stages.weights.collect import collect, sweep_leftovers
from stages.weights.errors import NoSpaceError
from stages.weights.mapped_files import MappedFiles
from stages.weights.publish import Publisher
from stages.weights.reader import load_manifest
from stages.weights.tensors import LocalTensor
from tests.weights_kit import PROBE, as_writer, make_context, make_publisher, run_ranks, small_tensors
from tests.weights_spares_kit import FILE, assert_published, inode, publish, with_spare

MEMORY = "/dev/shm"
CPU = torch.device("cpu")


@pytest.fixture
def run() -> Iterator[RunDir]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield as_writer(RunDir.create(Path(folder) / "run"), "trainer")


@pytest.fixture(params=[False, True], ids=["only files that are there", "new files too"])
def publisher(run: RunDir, request: pytest.FixtureRequest) -> Iterator[Publisher]:
    """With a spare: what it publishes next is copied into that."""
    with make_publisher(run) as made:
        made.mapped_files.makes_files = request.param
        with_spare(made)
        yield made


def whole(tensors: dict[str, torch.Tensor]) -> list[LocalTensor]:
    return [LocalTensor.whole(name, tensor) for name, tensor in tensors.items()]


def maps_of(run: RunDir) -> list[str]:
    """Files of the run that this process has mapped."""
    return [
        line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if str(run.root) in line
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_may_change_once_begin_has_returned_and_no_buffer_holds_them(run: RunDir, dtype: str) -> None:
    parameters = small_tensors()
    before = {name: tensor.to(getattr(torch, dtype), copy=True) for name, tensor in parameters.items()}

    with make_publisher(run, dtype=dtype) as publisher:
        publisher.mapped_files.makes_files = True
        publication = publisher.begin(1, 1, whole(parameters), PROBE)
        for tensor in parameters.values():
            tensor.fill_(torch.nan)
        publication.finish()

        assert publisher.copier.allocated_bytes == publication.report.peak_extra_host_bytes == 0
    assert_published(run, 1, before)


@given(cut=st.integers(0, 8), turned=st.booleans(), file_bytes=st.sampled_from([1, 200, 10**9]))
def test_slices_of_every_kind_end_where_they_belong(cut: int, turned: bool, file_bytes: int) -> None:
    """Columns of a matrix lie in its file in many stretches, rows in one."""
    tensors = {"a": torch.randn(8, 8), "b": torch.randn(5).half(), "c": torch.randn(())}
    matrix = tensors["a"]
    shares = [matrix[:, :cut], matrix[:, cut:]] if turned else [matrix[:cut], matrix[cut:]]
    owned = [
        *(
            LocalTensor.along("a", (8, 8), int(turned), start, share)
            for start, share in zip((0, cut), shares, strict=True)
        ),
        *whole({name: tensor for name, tensor in tensors.items() if name != "a"}),
    ]
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        run = RunDir.create(Path(folder) / "run")
        with make_publisher(run, max_file_bytes=file_bytes) as publisher:
            publisher.mapped_files.makes_files = True
            publisher.begin(1, 1, owned, PROBE).finish()
        assert_published(run, 1, {name: tensor.float() for name, tensor in tensors.items()})


def test_files_in_use_by_turns_stay_mapped_and_no_others(run: RunDir, publisher: Publisher) -> None:
    seen = set()
    for version in range(4, 12):
        publish(publisher, version)
        assert_published(run, version, small_tensors(version))
        seen.add(inode(run, version))
        collect(make_context(run))

    assert len(seen) == 3
    assert len(maps_of(run)) == 3
    assert not any("deleted" in name for name in maps_of(run))
    assert publisher.copier.allocated_bytes == 0


def test_files_that_a_trainer_of_an_older_attempt_has_mapped_are_left_to_it(run: RunDir, publisher: Publisher) -> None:
    """It hung; what it still copies when it goes on must not show in a version of the next attempt."""
    publish(publisher, 4)
    old_inode = inode(run, 4)
    run.start_attempt(1)
    later = RunDir.open(run.root, writer="trainer")

    with make_publisher(later) as next_publisher:
        for version in (5, 6):
            publish(next_publisher, version)
        assert 4 in collect(make_context(later)).versions
        manifest = publish(next_publisher, 7)
        with pytest.raises((OSError, RuntimeError, ValueError)):
            publish(publisher, 7, small_tensors(99))

        assert inode(later, 7) != old_inode
        assert manifest == load_manifest(later, 7)
        assert_published(later, 7, small_tensors(7))


def test_only_a_gpu_has_new_files_mapped(run: RunDir) -> None:
    with make_publisher(run) as publisher:
        publish(publisher, 1)
        assert maps_of(run) == []
        assert publisher.copier.allocated_bytes > 0
    assert MappedFiles(torch.device("cuda", 0)).makes_files


def test_memory_of_deleted_files_is_given_back_at_the_next_version(run: RunDir, publisher: Publisher) -> None:
    publish(publisher, 4)
    (run.weights_version(4) / FILE).unlink()
    assert [name for name in maps_of(run) if "deleted" in name]

    publish(publisher, 5)

    assert [name for name in maps_of(run) if "deleted" in name] == []


def test_nothing_stays_mapped_after_the_publisher(run: RunDir) -> None:
    with make_publisher(run) as publisher:
        publisher.mapped_files.makes_files = True
        publish(publisher, 1)
        assert len(maps_of(run)) == 1

    assert maps_of(run) == []
    assert_published(run, 1, small_tensors(1))


def test_a_publication_that_nobody_finishes_leaves_nothing(run: RunDir) -> None:
    with make_publisher(run) as publisher:
        publisher.mapped_files.makes_files = True
        publisher.begin(1, 1, whole(small_tensors()), PROBE)

    assert os.listdir(run.weights) == []
    assert maps_of(run) == []


def test_full_memory_is_its_own_error_and_the_next_version_is_sound(
    run: RunDir, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    publisher.mapped_files.close()
    with monkeypatch.context() as broken:
        broken.setattr(os, "posix_fallocate", full)
        with pytest.raises(NoSpaceError):
            publisher.begin(4, 4, whole(small_tensors()), PROBE)
    sweep_leftovers(run, run.weights)  # as a collection does
    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000002", "v000003"]

    publish(publisher, 5)
    assert_published(run, 5, small_tensors(5))


def test_a_copy_that_fails_fails_the_version_and_not_the_next(
    run: RunDir, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(torch.Tensor):
        """Cannot be read."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.Tensor.copy_:
                raise RuntimeError("device lost")
            return super().__torch_function__(func, types, args, kwargs)

    broken: dict[str, torch.Tensor] = {"a": torch.randn(4, 4).as_subclass(Broken)}
    with pytest.raises(RuntimeError, match="device lost"):
        publisher.begin(4, 4, whole(broken), PROBE).finish()
    sweep_leftovers(run, run.weights)  # as a collection does
    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000002", "v000003"]

    publish(publisher, 5)
    assert_published(run, 5, small_tensors(5))


def test_where_files_cannot_be_pinned_copies_go_to_buffers_and_it_is_said(
    run: RunDir, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusing(*_: object) -> None:
        raise torch.cuda.CudaError.__new__(torch.cuda.CudaError)

    monkeypatch.setattr("stages.weights.mapped_files._Mapped.of", refusing)
    publisher.mapped_files.close()

    for version in (4, 5):
        publish(publisher, version)
        assert_published(run, version, small_tensors(version))

    assert capsys.readouterr().out.count("files cannot be pinned") == 1
    assert maps_of(run) == []


def test_several_ranks_write_their_files_as_elsewhere(run: RunDir) -> None:
    def body(group):  # type: ignore[no-untyped-def]
        with make_publisher(run, group) as publisher:
            publisher.mapped_files.makes_files = True
            owned = list(small_tensors(1).items())[group.rank :: 2]
            publish(publisher, 1, dict(owned))
            return maps_of(run)

    assert [future.result() for future in run_ranks(2, body)] == [[], []]
    assert_published(run, 1, small_tensors(1))


def test_a_file_of_another_length_is_mapped_anew(tmp_path: Path) -> None:
    files = MappedFiles(CPU)
    files.makes_files = True
    for num_bytes in (5000, 9000, 3):
        memory = files.memory(tmp_path, {"a": num_bytes, "b": 10}, threads=2)
        memory["a"].fill_(num_bytes % 251)

        assert (tmp_path / "a").read_bytes() == bytes([num_bytes % 251]) * num_bytes
        held = files.descriptor((tmp_path / "a").stat())
        assert held is not None
        assert os.fstat(held).st_size == num_bytes
    files.close()
    assert files.descriptor((tmp_path / "a").stat()) is None
