"""The agent reads a version into the memory of the node, for the engines there.

An engine's worker can do that itself, and does where the agent does not. But an engine that generates holds the interpreter's lock
most of the time, and every piece has to wait for it, while the agent's process has nothing else to do (docs/benchmarks.md, "New
weights in a busy vLLM"). It reads only what leaves the workers nothing to do with the bytes: whole versions whose sums the trainer has
published. They wait for the lock of that memory meanwhile, and judge: where the agent fails, they read, and say what is wrong.

On the trainer's host it begins before the version is published (`stages.rollout.read_ahead`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stages.rollout.errors import ReloadRefusedError, RolloutError
from stages.rollout.published_sums import has_sums
from stages.rollout.read_ahead import ReadAhead
from stages.rollout.signature import model_signature
from stages.rollout.staged_delta import name_of
from stages.rollout.staging import DroppedError, NoSharedMemoryError, Segment, SegmentLayout
from stages.rundir import OutsideRunError, RunDir
from stages.weights.errors import WeightsError
from stages.weights.manifest import Manifest
from stages.weights.progress import unfinished
from stages.weights.reader import load_manifest
from stages.weights.versions import read_version
from traces.recorder import Recorder

_LOOK_S = 0.05
_BEGIN_S = 1.0
"""A reading that has not begun by then hangs, in a file of a server that does not answer for example: the workers are not kept from
their own, which has a deadline."""
_ANSWER_S = 60.0
"""More than an order may take beyond its deadline."""
_RELEASE_S = 0.1
"""For one that has done its work: the next one shall not find it still there."""
_LAST_PIECE_S = 2.0
"""For a reading that is given up between two pieces."""
_PROBLEMS = (WeightsError, RolloutError, ReloadRefusedError, OutsideRunError, OSError)
"""Of a version, of its files, or of the memory: an engine meets them too, and judges."""


@dataclass
class _Reading:
    """`begun`: the workers may come, for this process or another one has the lock, or nobody is to be waited for. `over`: they
    have come, or will not. `turn_s`: for how long another reading is waited for."""

    version: int
    digest: str
    deadline_s: float
    turn_s: float = 0.0
    begun: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        self.begun.set()
        if self.over.is_set():
            raise DroppedError


class NodeReader:
    """One for each agent. `start_folder` is what its server was started from, which says what its engine takes."""

    def __init__(self, run: RunDir, weights_dtype: str, recorder: Recorder) -> None:
        self._run = run
        self._recorder = recorder
        self._weights_dtype = weights_dtype
        self._turn = threading.Lock()
        self._said = ""
        self._layout: tuple[Path, SegmentLayout] | None = None
        self._joined: tuple[SegmentLayout, Segment] | None = None
        self._ahead: ReadAhead | None = None
        self._tried = ""
        self.start_folder: Path | None = None

    def look_ahead(self, newer_than: int) -> None:
        """Begin to read a version above `newer_than` that a trainer of this host is writing, if there is one; called again and again.

        Returns at once, and never raises for what it finds: the engine's server is watched by the same thread.
        """
        ahead = self._ahead
        # What a killed trainer has left does not replace what is newer.
        oldest = newer_than + 1 if ahead is None else max(newer_than + 1, ahead.version)
        try:
            found = unfinished(self._run, oldest - 1)
        except OSError as problem:
            self._say(oldest, problem)
            return
        if found is None or found[1].name == self._tried:
            return
        version, folder = found
        if not self._turn.acquire(blocking=False):
            if ahead is not None and ahead.version != version:
                ahead.stop()  # who begins a newer version has given it up
            return
        self._tried = folder.name
        self._begin_ahead(ReadAhead(self._run, version, folder, self._recorder))

    def _begin_ahead(self, ahead: ReadAhead) -> None:
        try:
            threading.Thread(target=self._read_ahead, args=(ahead,), name="read-ahead", daemon=True).start()
        except RuntimeError as problem:  # no thread is to be had: a limit of processes is reached
            self._turn.release()
            self._say(ahead.version, problem)
        else:
            self._ahead = ahead

    @contextmanager
    def reading(
        self, version: int, digest: str, *, deadline_s: float, pause: Callable[[float], None]
    ) -> Iterator[None]:
        """Read in a thread while the body orders the engine to prepare the version; what is there stays until the body ends.

        `pause` sleeps for so many seconds, and raises to give up. Never raises for what is wrong with the version.
        """
        mine = _Reading(version, digest, deadline_s)
        ahead = self._ahead
        if ahead is not None and not ahead.over.is_set():
            if ahead.version == version:
                mine.turn_s = deadline_s
                mine.begun.set()  # the workers wait for its end as for ours
            else:
                mine.turn_s = _LAST_PIECE_S
                ahead.stop()
        thread = threading.Thread(target=self._read, args=(mine,), name="node-reader", daemon=True)
        thread.start()
        try:
            end_s = time.monotonic() + _BEGIN_S
            while not mine.begun.wait(_LOOK_S) and time.monotonic() < end_s:
                pause(0.0)
            yield
        finally:
            mine.over.set()
            thread.join(_RELEASE_S)

    def close(self) -> None:
        """Leave the node's memory, so that the last one can remove it; also a reading that does not end does not keep it."""
        if self._ahead is not None:
            self._ahead.stop()
        if self._turn.acquire(timeout=_LAST_PIECE_S):
            try:
                self._leave()
            finally:
                self._turn.release()
        elif self._joined is not None:
            self._joined[1].leave()

    def _leave(self) -> None:
        if self._joined is not None:
            self._joined[1].close()
            self._joined = None

    def _read_ahead(self, ahead: ReadAhead) -> None:
        """Has the turn, and gives it back."""
        try:
            ahead.read(*self._segment())
        except DroppedError:
            pass  # another version is wanted, or none
        except _PROBLEMS as problem:
            self._say(ahead.version, problem)
        finally:
            self._turn.release()
            ahead.over.set()

    def _read(self, mine: _Reading) -> None:
        # One that was given up may still be in a slow read: then the workers wait for its end, or read.
        if not self._turn.acquire(timeout=mine.turn_s):
            mine.begun.set()
            return
        try:
            manifest = load_manifest(self._run, mine.version, mine.digest)
            if manifest.delta is None and has_sums(manifest):
                self._stage(mine, manifest)
        except DroppedError:
            pass  # by the body, which says why
        except _PROBLEMS as problem:
            self._say(mine.version, problem)
        finally:
            mine.begun.set()
            self._turn.release()

    def _say(self, version: int, problem: Exception) -> None:
        """Once: the memory that an engine does not share, it does not share next time either."""
        if str(problem) != self._said:
            print(f"version {version} was not read ahead of the engine: {problem}", flush=True)
        self._said = str(problem)

    def _stage(self, mine: _Reading, manifest: Manifest) -> None:
        layout, segment = self._segment()
        layout.check_fit(manifest)
        if mine.over.is_set():
            return  # it hung before it had begun, and what the memory holds meanwhile is somebody's

        def fill() -> None:
            mine.begun.set()
            tensors = layout.views(segment.memory)
            with self._recorder.span("read_weights", version=manifest.version, bytes=manifest.weight_bytes):
                read_version(self._run, manifest, into=tensors, check=mine.check)

        segment.hold(name_of(manifest.state), fill, deadline_s=mine.deadline_s, check=mine.check)
        try:
            mine.begun.set()
            mine.over.wait(mine.deadline_s + _ANSWER_S)
        finally:
            segment.release()

    def _segment(self) -> tuple[SegmentLayout, Segment]:
        """What the engine made. Raises NoSharedMemoryError."""
        if self.start_folder is None:
            raise NoSharedMemoryError("no engine was started")
        if self._layout is None or self._layout[0] != self.start_folder:
            # Once: the folder may be gone when the next version comes.
            signature = model_signature(self.start_folder, self._weights_dtype, ())
            self._layout = self.start_folder, SegmentLayout.of(signature)
        layout = self._layout[1]
        if self._joined is None or self._joined[0] != layout:
            self._leave()
            self._joined = layout, Segment(self._run.run_id, layout, makes=False)
        return self._joined
