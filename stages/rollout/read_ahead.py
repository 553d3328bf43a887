"""Reads a version into the memory of the node while the trainer, on the same host, is still writing it.

Nothing that the trainer says meanwhile is believed: what was read is hashed as it lies in the memory, and when the manifest is there,
the parts that it names are kept where just their bytes have their digests, and all others are read (again). Only then has the memory
a name, and others may use it.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import torch

from stages.rollout.published_sums import has_sums
from stages.rollout.staged_delta import name_of
from stages.rollout.staging import DroppedError, Segment, SegmentLayout
from stages.rundir import RunDir
from stages.weights.errors import WeightsError
from stages.weights.manifest import xxh3_128
from stages.weights.parallel import thread_count
from stages.weights.progress import ProgressReader, Stretch
from stages.weights.reader import load_manifest, read_into
from stages.weights.tensors import bytes_of
from stages.weights.versions import read_version
from traces.recorder import Recorder

_LOOK_S = 0.005
_PATIENCE_S = 30.0
"""A trainer that has finished no part for so long is stuck, or dead: others may want the memory."""


class ReadAhead:
    """One version, of which the trainer fills `folder`. `over` is set by whoever calls `read`, when others may have the memory."""

    def __init__(self, run: RunDir, version: int, folder: Path, recorder: Recorder) -> None:
        self.version = version
        self.over = threading.Event()
        self.digests: dict[tuple[str, int, int], str] = {}
        self._run = run
        self._folder = folder
        self._recorder = recorder
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Give up at the next piece."""
        self._stopped.set()

    def read(self, layout: SegmentLayout, segment: Segment) -> None:
        """Have the memory alone until the version is there under its name; leave it at once when anybody else has it now.

        Raises DroppedError after `stop`, VersionNotPublishedError when the trainer gave the version up, and what reading and
        `SegmentLayout.check_fit` raise. The memory has no name then.
        """
        if not segment.try_alone():
            return
        try:
            segment.write_name("")
            tensors = layout.views(segment.memory)
            with self._recorder.span("read_ahead", version=self.version) as span:
                self._read_parts(tensors)
                span.add(parts=len(self.digests))
            self._complete(layout, segment, tensors)
        finally:
            segment.release()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise DroppedError

    def _read_parts(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Until the folder is gone: it has the version's name then, or was given up."""
        readings: list[Future[None]] = []
        newest_s = time.monotonic()
        with (
            closing(_Parts(self._folder, tensors, self.digests)) as parts,
            closing(ProgressReader(self._folder)) as progress,
            # Half of the processors: the trainer copies and hashes on the same ones.
            ThreadPoolExecutor(max(1, thread_count(0) // 2), thread_name_prefix="ahead") as pool,
        ):
            try:
                while not self._stopped.wait(_LOOK_S) and time.monotonic() < newest_s + _PATIENCE_S:
                    for stretch in progress.new():
                        if parts.claim(stretch):
                            newest_s = time.monotonic()
                            readings.append(pool.submit(parts.read, stretch, self._check))
            except FileNotFoundError:
                pass
        for reading in readings:
            reading.result()
        self._check()

    def _complete(self, layout: SegmentLayout, segment: Segment, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read what is missing, now that the manifest says what it must be."""
        manifest = load_manifest(self._run, self.version)
        if manifest.delta is not None or not has_sums(manifest):
            return
        layout.check_fit(manifest)
        with self._recorder.span("read_weights", version=manifest.version, bytes=manifest.weight_bytes):
            read_version(self._run, manifest, into=tensors, check=self._check, have=self.digests)
        segment.write_name(name_of(manifest.state))


class _Parts:
    """Reads from files in `folder` into `tensors`. `digests` gets those of what then lies there, by tensor, first byte and length.

    `claim` belongs to one thread; `read` may be called by several.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], digests: dict[tuple[str, int, int], str]
    ) -> None:
        self._folder = folder
        self._bytes = {name: bytes_of(tensor) for name, tensor in tensors.items()}
        self._claimed: dict[str, list[range]] = {name: [] for name in tensors}  # in their order
        self._digests = digests
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}

    def claim(self, stretch: Stretch) -> bool:
        """Is its place one that the engine has, and that nothing else was read to? What was hashed must not change."""
        place = range(stretch.first, stretch.first + stretch.length)
        if stretch.name not in self._bytes or place.stop > len(self._bytes[stretch.name]):
            return False
        others = self._claimed[stretch.name]
        at = bisect_right(others, place.start, key=lambda other: other.start)
        is_behind = at == 0 or others[at - 1].stop <= place.start
        is_before = at == len(others) or place.stop <= others[at].start
        if not (place and is_behind and is_before):
            return False
        others.insert(at, place)
        return True

    def read(self, stretch: Stretch, check: Callable[[], None]) -> None:
        """What cannot be read has no digest: it is read again, and then it is said what is wrong. Raises what `check` raises."""
        check()
        view = self._bytes[stretch.name][stretch.first : stretch.first + stretch.length].data
        try:
            read_into(self._file(stretch.file), view, stretch.offset, stretch.file, stretch.offset + stretch.length)
        except (OSError, WeightsError):
            return
        self._digests[stretch.name, stretch.first, stretch.length] = xxh3_128(view)

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)

    def _file(self, name: str) -> int:
        with self._lock:
            if name not in self._files:
                # Not blocking: a fifo in place of the file must not hang us.
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                self._files[name] = os.open(self._folder / name, flags)
            return self._files[name]
