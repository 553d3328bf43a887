"""The product's own two ends of the exchange in one process: a trainer's publisher and a rollout worker's staging."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Self

from benchmarks.weights_model import Shape, random_tensors, write_config
from conf.sections import WeightsConfig
from stages.files import remove_tree
from stages.rollout.checksums import word_of
from stages.rollout.copy_plan import Copy, View
from stages.rollout.signature import model_signature
from stages.rollout.source_sums import Source, SourceSums
from stages.rollout.staging import SegmentLayout, Staging
from stages.rundir import RunDir
from stages.weights import spares
from stages.weights.manifest import Manifest, Probe
from stages.weights.publish import Publisher
from stages.weights.reader import load_manifest, read_verified
from stages.weights.sums import column_factors
from stages.weights.tensors import SAFETENSORS_NAMES, TORCH_DTYPES, LocalTensor

PROBE = Probe((1, 2, 3), (-1.0, -1.0))
_DEADLINE_S = 60.0


class Exchange:
    """A run whose weights are published again and again. `snapshot_s`: what the last publication kept training waiting.

    A second run is for versions that are written to new files; the first one's files are the same all the time.
    """

    def __init__(self, folder: Path, shape: Shape, dtype: str, threads: int, fsync: str) -> None:
        self.run = RunDir.create(folder / "run")
        self._options = WeightsConfig(dtype=dtype, io_threads=threads, fsync=fsync)
        source = write_config(folder / "model", shape, dtype)
        self._other_run = RunDir.create(folder / "other_run")
        self._publisher, self._other = (
            Publisher(run, source_folder=source, options=self._options) for run in (self.run, self._other_run)
        )
        self.tensors = random_tensors(shape, TORCH_DTYPES[SAFETENSORS_NAMES[dtype]], "cpu", seed=0)
        self.version = 0
        self.snapshot_s = 0.0
        self._prepared = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()
        self._other.close()

    @property
    def folder(self) -> Path:
        """Of the newest version."""
        return self.run.weights_version(self.version)

    def publish(self, *, lend: bool = False) -> Manifest:
        self.version += 1
        return self._publish(self._publisher, lend=lend)

    def publish_new(self) -> Manifest:
        """To new files; `remove_new` removes them."""
        return self._publish(self._other, lend=False)

    def remove_new(self) -> None:
        remove_tree(self._other_run.weights_version(self.version))

    def _publish(self, publisher: Publisher, *, lend: bool) -> Manifest:
        largest_first = sorted(self.tensors.items(), key=lambda item: -item[1].numel())  # as a trainer gives them
        tensors = [LocalTensor.whole(name, tensor) for name, tensor in largest_first]
        publication = publisher.begin(self.version, self.version, tensors, PROBE, lend=lend)
        manifest = publication.finish()
        self.snapshot_s = publication.report.snapshot_s
        return manifest

    def recycle(self) -> bool:
        """As a collection does with a version that nobody uses: the next is written over its files (True), or, on filesystems where
        that is not quicker, they are removed."""
        is_kept = spares.keep(self.run, self.folder)
        if not is_kept:
            remove_tree(self.folder)
        return is_kept

    @cached_property
    def staging(self) -> Staging:
        """As a worker on a CPU makes it when it starts, from the files of its start version."""
        signature = model_signature(self.folder, self._options.dtype, ())
        return Staging(self.run.run_id, SegmentLayout.of(signature), for_cuda=False)

    @cached_property
    def sources(self) -> list[Source]:
        """Of one copy into the engine for each tensor, as a worker makes them once, at its start."""
        found = []
        for name, tensor in self.staging.tensors.items():
            view = View(tuple(tensor.shape), tensor.stride(), 0)
            found.append(Source.of(Copy(name, view, name, view), tensor, word_of(tensor, tensor)))
        return found

    def prepare(self, *, sums: bool = True) -> None:
        """As `EngineWeights.stage` on the worker that reads: lock, manifest, bytes, digests and, with `sums`, those of the
        copies into the engine."""
        staged = self.staging.tensors
        manifest = load_manifest(self.run, self.version)
        collected = self._sums(manifest) if sums else None

        def fill() -> None:
            threads = self._options.io_threads
            read_verified(
                self.run,
                manifest,
                into=staged,
                threads=threads,
                arrived=collected.add if collected and collected.wants_bytes else None,
            )

        self._prepared += 1
        content = f"version {self.version} {manifest.digest} {self._prepared}"
        if not self.staging.hold(content, fill, deadline_s=_DEADLINE_S, check=lambda: None):
            raise RuntimeError(f"{content} was in the segment before it was read")
        if collected:
            collected.complete(was_added=True)
        self.staging.release()

    def _sums(self, manifest: Manifest) -> SourceSums:
        factors = column_factors(max(source.view.shape[-1] for source in self.sources))
        return SourceSums(self.sources, factors, {}, manifest.tensors)
