"""On a real GPU: what is published is what the parameters were when the snapshot was taken.

`python -m pytest tests/integration/test_publish_gpu.py`; no vLLM, less than 1 GB of GPU memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conf.sections import WeightsConfig
from stages.rundir import RunDir
from stages.weights.collect import collect
from stages.weights.filesystems import lies_in_memory
from stages.weights.publish import Publisher
from stages.weights.reader import load_manifest, read_verified
from stages.weights.tensors import LocalTensor
from stages.weights.versions import read_version
from tests.engine_kit import with_sums
from tests.weights_kit import PROBE, as_writer, make_context, make_source

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["disk", "memory"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield Path(memory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_of_a_gpu_may_change_once_begin_has_returned(folder: Path, tmp_path: Path, dtype: str) -> None:
    """The step before is still in the queue of the device when the snapshot begins; the step after overwrites it.

    In memory, versions from the fourth on are copied over the files of old ones, which stay mapped and pinned.
    """
    run = as_writer(RunDir.create(folder / "run"), "trainer")
    in_memory = lies_in_memory(folder)
    device = torch.device("cuda", 0)
    options = WeightsConfig(dtype=dtype)
    parameters = {f"t{i}": torch.zeros(6000, 3000, device=device, dtype=torch.float32) for i in range(4)}
    matrix = torch.randn(4096, 4096, device=device)

    with Publisher(run, source_folder=make_source(tmp_path / "source"), options=options, device=device) as publisher:
        for version in range(1, 7 if in_memory else 3):
            for _ in range(50):
                matrix = torch.tanh(matrix @ matrix)
            for number, parameter in enumerate(parameters.values()):
                parameter.fill_(version + number / 8)
            owned = (LocalTensor.whole(name, parameter.t()) for name, parameter in parameters.items())
            publication = publisher.begin(version, version, owned, PROBE)
            for parameter in parameters.values():
                parameter.fill_(torch.nan)
            manifest = publication.finish()

            read = read_verified(run, load_manifest(run, version, manifest.digest))
            for number, name in enumerate(parameters):
                assert read[name].shape == (3000, 6000)
                assert bool((read[name] == version + number / 8).all())
            collect(make_context(run))
    most_bytes = 0 if in_memory else 1.5 * manifest.weight_bytes + (64 << 20)
    assert publication.report.peak_extra_host_bytes <= most_bytes


def test_a_delta_of_a_gpus_parameters_is_read_as_what_they_were(tmp_path: Path) -> None:
    """The version before stays in the pinned buffer that the next one does not use."""
    run = RunDir.create(tmp_path / "run")
    device = torch.device("cuda", 0)
    options = WeightsConfig(dtype="bfloat16", delta="sparse")
    parameters = {f"t{i}": torch.randn(6000, 3000, device=device) for i in range(4)}
    source = make_source(tmp_path / "source")

    with Publisher(run, source_folder=source, options=options, device=device) as publisher:
        for version in range(4):
            for parameter in parameters.values():
                parameter[:: 100 + version] += 1.0
            wanted = {name: parameter.bfloat16().cpu() for name, parameter in parameters.items()}
            owned = (LocalTensor.whole(name, parameter) for name, parameter in parameters.items())
            publication = publisher.begin(version, version, owned, PROBE)
            for parameter in parameters.values():
                parameter.neg_()
            manifest = publication.finish()
            for parameter in parameters.values():
                parameter.neg_()

            assert (manifest.delta is not None) == (version > 0)
            read = read_version(run, load_manifest(run, version, manifest.digest))
            assert all(torch.equal(read[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("delta", ["off", "sparse"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sums_of_a_gpus_parameters_are_those_of_the_published_bytes(tmp_path: Path, dtype: str, delta: str) -> None:
    """Also of views that are not contiguous, that begin within a word, and of several pieces; a row of half words has none."""
    run = RunDir.create(tmp_path / "run")
    device = torch.device("cuda", 0)
    memory = torch.randn(8_000_003, device=device)
    parameters = {
        "pieces": torch.randn(24_000, 4096, device=device),
        "transposed": torch.randn(1000, 3000, device=device).t(),
        "columns": torch.randn(3000, 2000, device=device)[:, 500:1500],
        "odd_place": memory[3:].view(2000, 4000),
        "odd_place_16": memory.bfloat16()[1:8_000_001].view(2000, 4000),
        "vector": torch.randn(3584, device=device),
        "half_words": torch.randn(300, 17, device=device),
        "scalar": torch.randn((), device=device),
        "empty": torch.randn(0, 16, device=device),
    }
    options, source = WeightsConfig(dtype=dtype, delta=delta), make_source(tmp_path / "source")

    with Publisher(run, source_folder=source, options=options, device=device) as publisher:
        for version in (1, 2):
            parameters["pieces"][::1000] += 1.0
            owned = [LocalTensor.whole(name, parameter) for name, parameter in parameters.items()]
            publication = publisher.begin(version, version, owned, PROBE)
            for parameter in parameters.values():
                parameter.neg_()  # after the snapshot: neither bytes nor sums may be of this
            manifest = load_manifest(run, version, publication.finish().digest)
            for parameter in parameters.values():
                parameter.neg_()

            assert manifest == with_sums(manifest, read_version(run, manifest))
            assert len(manifest.tensors["pieces"].parts) > 1
            without = {name for name, entry in manifest.tensors.items() if entry.parts[0].sum64 is None}
            assert without == {"half_words", "scalar"}
            assert (manifest.delta is not None) == (version == 2 and delta == "sparse")
