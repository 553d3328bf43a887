"""Reads a version into the memory of the node while the trainer, on the same host, is still writing it.

Nothing that the trainer says meanwhile is believed: each part is hashed as it lies in the memory, and when the manifest is there, those
that have its digests are kept, and all others are read (again). Only then has the memory a name, and others may use it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stages.rollout.errors import ReloadRefusedError, RolloutError
from stages.rollout.published_sums import has_sums
from stages.rollout.staged_delta import name_of
from stages.rollout.staging import DroppedError, Segment, SegmentLayout
from stages.rundir import OutsideRunError, RunDir
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


class Ahead:
    """One version, of which the trainer fills `folder`. From `start` on it has the memory for itself, if nobody else has it now.

    `ended` is called at the end, in a thread, when the memory is free for others.
    """

    def __init__(
        self,
        run: RunDir,
        version: int,
        folder: Path,
        layout: SegmentLayout,
        segment: Segment,
        recorder: Recorder,
        ended: Callable[[], None],
    ) -> None:
        self.version = version
        self._run_dir = run
        self._folder = folder
        self._layout = layout
        self._segment = segment
        self._tensors = layout.views(segment.memory)
        self._bytes = {name: bytes_of(tensor) for name, tensor in self._tensors.items()}
        self._have: dict[tuple[str, tuple[int, ...]], str] = {}
        self._recorder = recorder
        self._ended = ended
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Give up at the next piece."""
        self._stop.set()

    def _run(self) -> None:
        try:
            if self._segment.try_alone():
                self._segment.write_name("")
                with self._recorder.span("read_ahead", version=self.version) as span:
                    self._read_parts()
                    span.add(parts=len(self._have))
                self._complete()
        except DroppedError:
            pass  # by `stop`
        except (WeightsError, RolloutError, ReloadRefusedError, OutsideRunError, OSError) as problem:
            print(f"version {self.version} was not read while it was written: {problem}", flush=True)
        finally:
            self._segment.release()
            self._ended()

    def _check(self) -> None:
        if self._stop.is_set():
            raise DroppedError

    def _read_parts(self) -> None:
        """Until the folder is gone: it has the version's name then, or was given up."""
        progress, newest_s = ProgressReader(self._folder), time.monotonic()
        # Half of the processors: the trainer copies and hashes on the same ones.
        with ThreadPoolExecutor(max(1, thread_count(0) // 2), thread_name_prefix="ahead") as pool:
            try:
                while not self._stop.wait(_LOOK_S) and time.monotonic() < newest_s + _PATIENCE_S:
                    for stretch in progress.new():
                        newest_s = time.monotonic()
                        pool.submit(self._read, stretch)
            except FileNotFoundError:
                pass
            finally:
                pool.shutdown()
                progress.close()
                for fd in self._files.values():
                    os.close(fd)
        self._check()

    def _read(self, stretch: Stretch) -> None:
        """What fails is not in `_have`: it is read again, and then it is said what is wrong."""
        tensor = self._bytes.get(stretch.name)
        if self._stop.is_set() or tensor is None or stretch.first + stretch.length > len(tensor):
            return
        view = tensor[stretch.first : stretch.first + stretch.length].data
        try:
            read_into(self._file(stretch.file), view, stretch.offset, stretch.file, stretch.offset + stretch.length)
        except (OSError, WeightsError):
            return
        self._have[stretch.name, stretch.start] = xxh3_128(view)

    def _file(self, name: str) -> int:
        with self._lock:
            if name not in self._files:
                # Not blocking: a fifo in place of the file must not hang us.
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                self._files[name] = os.open(self._folder / name, flags)
            return self._files[name]

    def _complete(self) -> None:
        """Read what is missing, now that the manifest says what it must be. Raises VersionNotPublishedError when it was given up."""
        manifest = load_manifest(self._run_dir, self.version)
        if manifest.delta is not None or not has_sums(manifest):
            return
        self._layout.check_fit(manifest)
        with self._recorder.span("read_weights", version=manifest.version, bytes=manifest.weight_bytes):
            read_version(self._run_dir, manifest, into=self._tensors, check=self._check, have=self._have)
        self._segment.write_name(name_of(manifest.state))
