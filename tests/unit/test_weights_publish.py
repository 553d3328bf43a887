"""Publishing from one or several ranks: the bytes are right, and a failure leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from conf.sections import WeightsConfig
from stages.rundir import FencedError, RunDir
from stages.weights.errors import NoSpaceError, PublishError
from stages.weights.manifest import Manifest
from stages.weights.publish import publish
from stages.weights.ranks import RankGroup
from stages.weights.reader import load_manifest, read_verified, verify
from stages.weights.tensors import LocalTensor
from tests.weights_kit import PROBE, make_source, publish_full, run_ranks, small_tensors


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


@dataclass(frozen=True)
class Piece:
    """One slice of a tensor and the rank that owns it."""

    rank: int
    name: str
    dim: int
    start: int
    stop: int


@st.composite
def sharded_models(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[Piece], int]:
    """Shapes, pieces that cover them, number of ranks."""
    ranks = draw(st.integers(1, 4))
    names = draw(st.lists(st.text("abz.0é", min_size=1, max_size=6), min_size=1, max_size=6, unique=True))
    shapes, pieces = {}, []
    for name in names:
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        shapes[name] = shape
        dim = draw(st.integers(0, max(0, len(shape) - 1)))
        length = shape[dim] if shape else 1
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=3))) if shape else []
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
            pieces.append(Piece(draw(st.integers(0, ranks - 1)), name, dim, start, stop))
    return shapes, pieces, ranks


def local(full: Mapping[str, torch.Tensor], piece: Piece) -> LocalTensor:
    tensor = full[piece.name]
    part = tensor.narrow(piece.dim, piece.start, piece.stop - piece.start) if tensor.dim() else tensor
    return LocalTensor.along(piece.name, tuple(tensor.shape), piece.dim, piece.start, part)


def publish_pieces(
    run: RunDir, full: Mapping[str, torch.Tensor], pieces: list[Piece], ranks: int, options: WeightsConfig
) -> list[Manifest]:
    source = make_source(run.root.parent / "source")

    def body(group: RankGroup) -> Manifest:
        return publish(
            run,
            version=1,
            step=1,
            tensors=[local(full, piece) for piece in pieces if piece.rank == group.rank],
            probe=PROBE if group.rank == 0 else None,
            source_folder=source,
            options=options,
            ranks=group,
        )

    return [future.result() for future in run_ranks(ranks, body)]


@settings(max_examples=60, deadline=None)
@given(model=sharded_models(), dtype=st.sampled_from(["float32", "bfloat16"]), limit=st.sampled_from([60, 10**9]))
def test_any_sharding_gives_the_files_that_safetensors_would_save(
    model: tuple[dict[str, tuple[int, ...]], list[Piece], int], dtype: str, limit: int
) -> None:
    shapes, pieces, ranks = model
    full = {name: torch.randn(shape) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder) / "run")
        options = WeightsConfig(dtype=dtype, max_file_bytes=limit)

        manifests = publish_pieces(run, full, pieces, ranks, options)

        assert all(manifest == manifests[0] for manifest in manifests)
        manifest = load_manifest(run, 1, manifests[0].digest)
        for file in {entry.file for entry in manifest.tensors.values()}:
            content = {
                name: full[name].to(getattr(torch, dtype)).contiguous()
                for name, entry in manifest.tensors.items()
                if entry.file == file
            }
            expected = safetensors.torch.save(content, metadata={"format": "pt"})
            assert (run.weights_version(1) / file).read_bytes() == expected
        read = read_verified(run, manifest)
        assert read.keys() == full.keys()
        assert all(torch.equal(read[name], full[name].to(getattr(torch, dtype))) for name in full)


def test_several_files_have_an_index_that_other_tools_understand(run: RunDir) -> None:
    full = small_tensors()
    manifest = publish_full(run, 1, full, WeightsConfig(dtype="float32", max_file_bytes=130))

    index = json.loads((run.weights_version(1) / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in full.values())
    for name, file in index["weight_map"].items():
        with safe_open(run.weights_version(1) / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), full[name])
    assert "model.safetensors.index.json" in manifest.files


def test_the_folder_holds_config_and_tokenizer_of_the_source_in_the_written_number_format(run: RunDir) -> None:
    publish_full(run, 1, options=WeightsConfig(dtype="float32"))

    folder = run.weights_version(1)
    assert sorted(os.listdir(folder)) == ["config.json", "manifest.json", "model.safetensors", "tokenizer.json"]
    config = json.loads((folder / "config.json").read_text())
    assert config == {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "torch_dtype": "float32"}


def test_published_files_are_closed_to_others(run: RunDir) -> None:
    publish_full(run, 1)

    modes = {path.name: path.stat().st_mode & 0o777 for path in run.weights_version(1).iterdir()}
    assert set(modes.values()) == {0o600}
    assert run.weights_version(1).stat().st_mode & 0o777 == 0o700


def test_latest_points_to_the_version(run: RunDir) -> None:
    publish_full(run, 1)
    manifest = publish_full(run, 2)

    latest = run.read(run.latest_json)
    assert latest is not None
    assert (latest["version"], latest["digest"], latest["path"]) == (2, manifest.digest, "weights/v000002")
    assert run.inside(latest["path"]) == run.inside(run.weights_version(2))


def test_parameters_with_gradients_and_strides_are_published_as_they_are(run: RunDir) -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 6).to(torch.bfloat16))

    manifest = publish_full(run, 1, {"w": parameter.t(), "v": parameter[:, 1]})

    read = read_verified(run, manifest)
    assert torch.equal(read["w"], parameter.detach().t().float())
    assert torch.equal(read["v"], parameter.detach()[:, 1].float())


def test_threads_write_what_one_thread_writes(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.weights.parallel._BYTES_WORTH_A_THREAD", 16)
    full = {f"t{i}": torch.randn(20, 7) for i in range(30)}

    manifest = publish_full(run, 1, full, WeightsConfig(dtype="float32", io_threads=8))

    read = read_verified(run, manifest, threads=8)
    assert all(torch.equal(read[name], full[name]) for name in full)


def test_short_writes_and_reads_are_continued(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:5]], offset))
    full = small_tensors()

    manifest = publish_full(run, 1, full)

    read = read_verified(run, manifest)
    assert all(torch.equal(read[name], full[name]) for name in full)


# ---- refusals ----------------------------------------------------------------------------------------------------


def assert_nothing_published(run: RunDir) -> None:
    assert os.listdir(run.weights) == []


def test_two_owners_of_one_element_are_refused_on_every_rank(run: RunDir) -> None:
    full = {"norm": torch.ones(4)}
    pieces = [Piece(0, "norm", 0, 0, 4), Piece(1, "norm", 0, 0, 4)]

    with pytest.raises(PublishError, match=r"tensor norm .* overlap"):
        publish_pieces(run, full, pieces, 2, WeightsConfig(dtype="float32"))

    assert_nothing_published(run)


def test_a_failure_of_one_rank_is_raised_on_all(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    full = small_tensors()
    source = make_source(run.root.parent / "source")
    pwrite = os.pwrite
    poison = full["model.layer.up"].numpy().tobytes()

    def failing(fd: int, data: memoryview, offset: int) -> int:
        if bytes(data) == poison:
            raise OSError(errno.EIO, "disk broke")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)

    def body(group: RankGroup) -> Manifest:
        mine = [name for number, name in enumerate(full) if number % 3 == group.rank]
        return publish(
            run,
            version=1,
            step=1,
            tensors=[LocalTensor.whole(name, full[name]) for name in mine],
            probe=PROBE,
            source_folder=source,
            options=WeightsConfig(dtype="float32"),
            ranks=group,
        )

    errors = [future.exception() for future in run_ranks(3, body)]

    assert [type(error) for error in errors] == [PublishError] * 3
    assert len({str(error) for error in errors}) == 1
    assert "disk broke" in str(errors[0])
    assert_nothing_published(run)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("function", ["pwrite", "fsync"])
def test_a_full_disk_has_its_own_error_and_leaves_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, code: int, function: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, full)
    with pytest.raises(NoSpaceError, match=r"wanted [\d,]+ bytes, available [\d,]+"):
        publish_full(run, 1, options=WeightsConfig(dtype="float32", fsync="always"))

    assert_nothing_published(run)


def test_space_is_asked_for_before_the_first_byte(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.weights.publication.available_bytes", lambda _: 100)
    written: list[int] = []
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: written.append(fd))

    with pytest.raises(NoSpaceError, match="available 100 ") as caught:
        publish_full(run, 1)

    assert caught.value.wanted_bytes > 100
    assert written == []
    assert_nothing_published(run)


@pytest.fixture
def tiny_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of 3 MiB, where this user may mount one."""
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_really_full_filesystem_keeps_the_version_before(tiny_filesystem: Path, tmp_path: Path) -> None:
    run = RunDir.create(tiny_filesystem / "run")
    source = make_source(tmp_path / "source")
    first = publish_full(run, 1, {"w": torch.randn(300_000)}, source=source)

    with pytest.raises(NoSpaceError) as caught:
        publish_full(run, 2, {"w": torch.randn(600_000)}, source=source)

    assert caught.value.wanted_bytes > 2_400_000
    assert caught.value.available_bytes < 2_000_000
    assert run.published_versions() == [1]
    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000001"]
    verify(run, load_manifest(run, 1, first.digest))


def test_a_filesystem_that_fills_up_while_writing_is_noticed(
    tiny_filesystem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.weights.publication._SMALL_BYTES_ALLOWANCE", -(10**9))  # let it begin
    run = RunDir.create(tiny_filesystem / "run")

    with pytest.raises(NoSpaceError):
        publish_full(run, 2, {"w": torch.randn(1_000_000)}, source=make_source(tmp_path / "source"))

    assert_nothing_published(run)


def test_a_version_is_published_once_in_an_attempt(run: RunDir) -> None:
    first = publish_full(run, 1)

    with pytest.raises(PublishError, match="version 1 was already published"):
        publish_full(run, 1, small_tensors(5))

    verify(run, load_manifest(run, 1, first.digest))


def test_a_new_attempt_publishes_a_version_again_and_sweeps_what_was_left(run: RunDir) -> None:
    publish_full(run, 1)
    (run.weights / ".v000002.tmp-0-0123abcd").mkdir()
    run.start_attempt(1)
    later = RunDir.open(run.root, writer="trainer")

    second = publish_full(later, 1, small_tensors(5))

    assert load_manifest(later, 1).digest == second.digest
    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000001"]


def test_an_older_attempt_cannot_publish_any_more(run: RunDir) -> None:
    run.start_attempt(1)

    with pytest.raises(PublishError, match=r"attempt 0 .* is over") as caught:
        publish_full(run, 1)

    assert isinstance(caught.value.__cause__, FencedError)
    assert_nothing_published(run)


def test_integers_are_refused_by_name(run: RunDir) -> None:
    with pytest.raises(PublishError, match=r"tensor steps has dtype torch\.int64"):
        publish_full(run, 1, {"steps": torch.arange(3)})


@pytest.mark.parametrize(("start", "shape"), [((0, 0), (4, 5)), ((2, 0), (3, 4)), ((0,), (4,)), ((0, -1), (4, 4))])
def test_a_slice_that_does_not_fit_is_refused_by_name(start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    wrong = LocalTensor("w", (4, 4), start, torch.zeros(shape))

    with pytest.raises(PublishError, match=r"tensor w: .* is no part of \[4, 4\]"):
        wrong.slice("F32")


@pytest.mark.parametrize("content", [None, "not json", "[]"])
def test_a_source_without_config_is_refused(run: RunDir, tmp_path: Path, content: str | None) -> None:
    source = tmp_path / "broken"
    source.mkdir()
    if content is not None:
        (source / "config.json").write_text(content)

    with pytest.raises(PublishError, match=r"config\.json"):
        publish_full(run, 1, source=source)

    assert_nothing_published(run)


def test_a_publication_without_probe_is_refused(run: RunDir) -> None:
    with pytest.raises(PublishError, match="no probe"):
        publish(
            run,
            version=1,
            step=1,
            tensors=[LocalTensor.whole("w", torch.ones(2))],
            probe=None,
            source_folder=make_source(run.root.parent / "source"),
            options=WeightsConfig(dtype="float32"),
        )

    assert_nothing_published(run)
