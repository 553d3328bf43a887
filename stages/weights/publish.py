"""Publish a version of the weights: every trainer rank writes what it owns, rank 0 commits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch

from conf.sections import WeightsConfig
from stages.rundir import RunDir
from stages.weights import spares
from stages.weights.delta_chain import MOST_LINKS
from stages.weights.encoder import Snapshot
from stages.weights.filesystems import lies_in_memory, lies_on_a_disk_here, must_flush
from stages.weights.hf_folder import small_files
from stages.weights.layout import Layout, Offer, plan_layout
from stages.weights.manifest import Manifest, Probe
from stages.weights.mapped_files import MappedFiles
from stages.weights.parallel import thread_count
from stages.weights.publication import Publication
from stages.weights.ranks import RankGroup, SingleRank
from stages.weights.snapshot import Copier
from stages.weights.tensors import SAFETENSORS_NAMES, LocalTensor
from stages.weights.write_back import WriteBack


def publish(
    run: RunDir,
    *,
    version: int,
    step: int,
    tensors: Iterable[LocalTensor],
    probe: Probe | None,
    source_folder: Path,
    options: WeightsConfig,
    ranks: RankGroup | None = None,
    tokenizer_folder: Path | None = None,
) -> Manifest:
    """`Publisher.begin` and `Publication.finish` in one, for who publishes once and has nothing to do meanwhile.

    Tensors in host memory are not copied: the extra memory is, where they must be converted, a piece for each thread.
    """
    owned = list(tensors)
    device = next((local.tensor.device for local in owned if local.tensor.is_cuda), torch.device("cpu"))
    with Publisher(
        run,
        source_folder=source_folder,
        options=options,
        ranks=ranks,
        device=device,
        tokenizer_folder=tokenizer_folder,
    ) as publisher:
        return publisher.begin(version, step, owned, probe, lend=True).finish()


class Publisher:
    """Publishes one version after another: keeps the host buffers (pinned for a GPU), the threads and the layout.

    All ranks of `ranks` call it alike. The group must be used for nothing else while a publication is under way.
    Extra host memory is one copy of what the rank owns, in the published format; with weights.delta=sparse two, of this version
    and of the one before, and what differs. A trainer of one rank that publishes into memory (tmpfs), in full, needs none: its
    copies end in the files themselves.
    """

    options: WeightsConfig

    def __init__(
        self,
        run: RunDir,
        *,
        source_folder: Path,
        options: WeightsConfig,
        ranks: RankGroup | None = None,
        device: torch.device | None = None,
        tokenizer_folder: Path | None = None,
    ) -> None:
        """`source_folder` is a HF folder: config and tokenizer travel with each version, the tokenizer from `tokenizer_folder`
        when it is another one. Both count on rank 0."""
        self.run = run
        self.options = options
        self.ranks = ranks or SingleRank()
        self.dtype = SAFETENSORS_NAMES[options.dtype]
        self.threads = thread_count(options.io_threads)
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="weights")
        self.copier = Copier(device or torch.device("cpu"), self.pool)
        self.mapped_files = MappedFiles(device or torch.device("cpu"))
        self._write_back = WriteBack()
        self._source = source_folder
        self._tokenizer = tokenizer_folder
        self._current: Publication | None = None
        self._planned: tuple[list[Offer], Layout] | None = None
        self._before: Snapshot | None = None
        self._cannot_pin = False

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(
        self,
        version: int,
        step: int,
        tensors: Iterable[LocalTensor],
        probe: Probe | None,
        *,
        lend: bool = False,
        in_full: bool = False,
    ) -> Publication:
        """Copy this rank's tensors to the host and begin to write weights/v<version>/; collective.

        That is a complete HF folder, unless weights.delta=sparse and the version before was published by this publisher: then
        it may hold what differs instead. `in_full` or `lend` on any rank, and it does not.

        `tensors` are the slices that this rank owns: over all ranks every element exactly once. They are converted to
        `options.dtype` where they lie. When `begin` returns they may change; with `lend` they must not before `finish`
        returns, and host memory is not copied. `probe` counts on rank 0. Waits for the publication before.

        Raises PublishError on all ranks when any of them fails here.
        """
        if self._current is not None and not self._current.is_over:
            self._current.finish()
        if lend:
            self._before = None  # there will be no snapshot of this version
        elif self._before is not None:
            self.copier.keep()
        publication = Publication(self, version, step, probe, in_full=in_full)
        publication.begin(tensors, lend=lend)
        self._current = publication
        return publication

    @property
    def keeps_snapshots(self) -> bool:
        return self.options.delta == "sparse"

    def copies_into_files(self, *, lend: bool) -> bool:
        """Does a version's snapshot lie in its files from the start? See `stages.weights.mapped_files`."""
        is_copied = not lend or self.copier.is_cuda
        is_possible = self.ranks.size == 1 and not self.keeps_snapshots and not self._cannot_pin
        return is_copied and is_possible and lies_in_memory(self.run.weights)

    def map_files(self, folder: Path, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """As `MappedFiles.memory`; none, now and later, where the driver refuses to pin files: then copies go to host buffers."""
        try:
            return self.mapped_files.memory(folder, sizes, self.threads)
        except torch.cuda.CudaError as problem:
            print(f"weights are published through host buffers, because files cannot be pinned: {problem}", flush=True)
            self.mapped_files.close()
            self._cannot_pin = True
            return {}

    @property
    def base_digest(self) -> str:
        """Of the version before, when this rank has its bytes; else empty."""
        return "" if self._before is None else self._before.manifest.digest

    def base_for(self, offers: list[Offer], digests: set[str]) -> Snapshot | None:
        """What the next version may be a delta of: the version before, when all ranks have it, and owned the same then.

        `digests` are the `base_digest` of all ranks.
        """
        base = self._before
        is_common = base is not None and digests == {base.manifest.digest} and base.offers == offers
        return base if base is not None and is_common and base.links < MOST_LINKS else None

    def remember(self, snapshot: Snapshot | None) -> None:
        """The version that was just published; None when that failed, or when its bytes are not kept."""
        self._before = snapshot

    def published(self, folder: Path) -> None:
        """On rank 0: the version has its name, and readers."""
        if self.writes_back:
            self._write_back.begin(folder)

    def close(self) -> None:
        """An unfinished publication leaves nothing behind, nor do files that were kept to be written over."""
        if self._current is not None:
            self._current.close()
        self._write_back.stop()
        self.pool.shutdown()
        self.copier.close()
        self.mapped_files.close()
        if self.ranks.rank == 0:
            spares.drop(self.run)

    def layout(self, offers: list[Offer]) -> Layout:
        """Planned once, as long as the ranks offer the same."""
        if self._planned is None or self._planned[0] != offers:
            self._planned = (offers, plan_layout(offers, self.options.max_file_bytes))
        return self._planned[1]

    @cached_property
    def small_files(self) -> dict[str, bytes]:
        return small_files(self._source, self.options.dtype, self._tokenizer)

    @cached_property
    def tells_progress(self) -> bool:
        """Are readers of this host told which parts are whole? Only where a GPU makes the sums that they would have to make.

        Not of files that are memory: they are whole as soon as training goes on, and readers would only slow the copies.
        """
        return self.copier.is_cuda and not self.keeps_snapshots and lies_on_a_disk_here(self.run.weights)

    @cached_property
    def flushes(self) -> bool:
        return must_flush(self.options.fsync, self.run.weights)

    @cached_property
    def writes_back(self) -> bool:
        """Is a version written to its disk after it was published? Not before, and not by the kernel when it likes."""
        return lies_on_a_disk_here(self.run.weights) and not self.flushes and self.options.fsync != "never"
