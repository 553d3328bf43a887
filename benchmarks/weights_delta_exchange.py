"""Versions through a folder in full and as deltas, by the product's own publisher and staging, one after the other in one process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conf.sections import WeightsConfig
from stages.rollout.staged_delta import name_of, patch
from stages.rollout.staging import SegmentLayout, Staging
from stages.rundir import RunDir
from stages.weights.manifest import Manifest, Probe
from stages.weights.publish import Publisher
from stages.weights.tensors import LocalTensor
from stages.weights.versions import read_version

PROBE = Probe((1, 2, 3), (-1.0, -1.0))
WAYS = {"full": "off", "delta": "sparse"}
_DEADLINE_S = 60.0


class Way:
    """A run with one value of weights.delta, and the memory of one node."""

    def __init__(self, folder: Path, delta: str, threads: int, shapes: Sequence[tuple[int, ...]]) -> None:
        source = folder / "model"
        source.mkdir(parents=True)
        (source / "config.json").write_text("{}")
        self._threads = threads
        self._run = RunDir.create(folder / "run")
        options = WeightsConfig(delta=delta, io_threads=threads)
        self.publisher = Publisher(self._run, source_folder=source, options=options)
        layout = SegmentLayout.of({f"t{number}": ("BF16", shape) for number, shape in enumerate(shapes)})
        self._staging = Staging(self._run.run_id, layout, for_cuda=False)

    def exchange(self, version: int, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Publish, stage, and compare what arrived. `snapshot_s` of `publish_s` training is blocked."""
        named = [LocalTensor.whole(f"t{number}", tensor) for number, tensor in enumerate(tensors)]
        publication = self.publisher.begin(version, version, named, PROBE)
        manifest = publication.finish()
        started_s = time.perf_counter()
        self._stage(manifest)
        staged_s = time.perf_counter() - started_s
        if not all(torch.equal(self._staging.tensors[one.name], one.tensor) for one in named):
            raise RuntimeError(f"version {version} did not arrive as it was published")
        report = publication.report
        return {
            "bytes": manifest.total_bytes,
            "snapshot_s": report.snapshot_s,
            "publish_s": report.total_s,
            "prepare_s": staged_s,
            "extra_host_bytes": report.peak_extra_host_bytes,
        }

    def _stage(self, manifest: Manifest) -> None:
        tensors = self._staging.tensors

        def fill() -> None:
            read_version(self._run, manifest, into=tensors, threads=self._threads)

        self._staging.hold(
            name_of(manifest.state),
            fill,
            deadline_s=_DEADLINE_S,
            check=lambda: None,
            patch=partial(patch, self._run, manifest, tensors),
        )
        self._staging.release()


def through(folder: Path, versions: Iterator[list[torch.Tensor]], threads: int) -> Iterator[dict[str, Any]]:
    """One line for each version but the first, which both ways publish in full."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="libra-delta-") as scratch, ExitStack() as stack:
        first = next(versions)
        shapes = [tuple(tensor.shape) for tensor in first]
        ways = {name: Way(Path(scratch) / name, delta, threads, shapes) for name, delta in WAYS.items()}
        for way in ways.values():
            stack.callback(way.publisher.close)
            way.exchange(0, first)
        for version, tensors in enumerate(versions, start=1):
            found = {name: way.exchange(version, tensors) for name, way in ways.items()}
            yield {f"{name}_{key}": value for name, values in found.items() for key, value in values.items()}
