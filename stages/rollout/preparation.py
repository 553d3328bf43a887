"""One version at a time on its way from files to host memory, while the engine generates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from stages.rollout.engine_weights import EngineWeights, StagedVersion
from stages.rollout.staging import DroppedError
from stages.rundir import OutsideRunError, RunDir
from stages.weights.errors import WeightsError
from stages.weights.parallel import quick_handover
from stages.weights.reader import load_manifest


@dataclass
class _Preparation:
    """`staged` is set once `done` is, unless there is an `error`. `lapse` gives the staged bytes up when it fires."""

    run: RunDir
    version: int
    digest: str
    keep_s: float
    done: threading.Event = field(default_factory=threading.Event)
    dropped: threading.Event = field(default_factory=threading.Event)
    lapse: threading.Timer | None = None
    staged: StagedVersion | None = None
    error: str = ""
    tensor: str = ""

    def check(self) -> None:
        if self.dropped.is_set():
            raise DroppedError

    def drop(self) -> None:
        self.dropped.set()
        if self.lapse is not None:
            self.lapse.cancel()


class Preparations:
    """`start`, `state` and `taken` belong to one thread (the engine's loop); readings have threads of their own."""

    def __init__(self, weights: EngineWeights) -> None:
        self._weights = weights
        self._staging = threading.Lock()  # whoever has it may hold and release what is staged
        self._current: _Preparation | None = None

    def start(self, run: RunDir, version: int, digest: str, keep_s: float) -> None:
        """Read in a thread; what was prepared before is dropped.

        The bytes stay as they are for `keep_s` from when they are staged; then other processes may replace them.
        """
        if self._current is not None:
            self._current.drop()
        self._current = _Preparation(run, version, digest, keep_s)
        threading.Thread(target=self._read, args=(self._current,), name="libra-prepare", daemon=True).start()

    def state(self) -> dict[str, Any]:
        current = self._current
        if current is None:
            return {"done": False, "error": "nothing was ordered", "tensor": ""}
        return {"done": current.done.is_set(), "error": current.error, "tensor": current.tensor}

    @contextmanager
    def taken(self, version: int, digest: str) -> Iterator[StagedVersion]:
        """The staged version, once. Raises RuntimeError when it is not this one, or not prepared (any more)."""
        current, self._current = self._current, None
        if current is None or not current.done.is_set() or (current.version, current.digest) != (version, digest):
            raise RuntimeError(f"version {version} with digest {digest} is not prepared in this worker")
        with self._staging:
            try:
                if current.staged is None or current.dropped.is_set():
                    raise RuntimeError(f"version {version} is not prepared in this worker any more: {current.error}")
                yield current.staged
            finally:
                current.drop()
                self._weights.staging.release()

    def _read(self, mine: _Preparation) -> None:
        with quick_handover(), self._staging:
            try:
                manifest = load_manifest(mine.run, mine.version, mine.digest)
                mine.staged = self._weights.stage(mine.run, manifest, deadline_s=mine.keep_s, check=mine.check)
                self._keep(mine)
            except (WeightsError, OutsideRunError, OSError) as error:
                mine.error, mine.tensor = str(error), getattr(error, "tensor", "")
            except DroppedError:
                mine.error = "another order came, or none in time"
            except Exception as error:
                mine.error = f"reading failed: {error!r}"
                raise
            finally:
                if mine.error:
                    self._weights.staging.release()
                mine.done.set()

    def _keep(self, mine: _Preparation) -> None:
        mine.lapse = threading.Timer(mine.keep_s, self._give_up, (mine,))
        mine.lapse.daemon = True
        mine.lapse.start()

    def _give_up(self, mine: _Preparation) -> None:
        with self._staging:
            if not mine.dropped.is_set():
                mine.error = f"nobody asked for it within {mine.keep_s:.0f} s"
                mine.drop()
                self._weights.staging.release()
