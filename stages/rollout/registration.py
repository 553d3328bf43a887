"""An instance's registration file and its heartbeat."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from stages.rollout.errors import ReplacedError
from stages.rundir import FencedError, RunDir
from stages.weights.instances import InstanceStatus, read_status, write_status

_PATIENCE_S = 15.0
"""Of a heartbeat that finds no room; the trainer takes an instance for dead after rollout.heartbeat_timeout_s, 60 s unless
somebody says otherwise."""


class Registration:
    """Writes `instances/<name>.json` when something changes and every `interval_s` seconds; every writing is a heartbeat.

    A context manager. The heartbeat goes on while the agent waits for its server, and stops when the agent dies. A
    failure to write, but for a disk that is full for a moment, is kept and raised by `check`, in the agent's own loop. An agent that has been replaced although it
    lives (its node was cut off, say) finds the registration of a later incarnation and gives way.
    """

    def __init__(
        self,
        run: RunDir,
        status: InstanceStatus,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._clock = clock
        self._status = status
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._failure: OSError | FencedError | ReplacedError | None = None
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def status(self) -> InstanceStatus:
        return self._status

    def update(self, **changes: Any) -> None:
        """Change fields of the registration and publish them now. Raises OSError, FencedError, ReplacedError."""
        with self._lock:
            self._check_place()
            self._status = replace(self._status, **changes, heartbeat=self._status.heartbeat + 1)
            write_status(self._run, self._status)

    def check(self) -> None:
        """Raises what went wrong in the heartbeat: OSError, ReplacedError, or FencedError when a newer attempt of the run exists."""
        if self._failure is not None:
            raise self._failure

    def _check_place(self) -> None:
        found = read_status(self._run, self._status.instance)
        if found is not None and found.incarnation > self._status.incarnation:
            raise ReplacedError(
                f"{self._status.instance} was replaced: start {found.incarnation} of it runs on {found.host}"
            )

    def _beat(self) -> None:
        failing_since_s: float | None = None
        while not self._ended.wait(self._interval_s):
            try:
                self.update()
            except (FencedError, ReplacedError) as failure:
                self._failure = failure
                return
            except OSError as failure:
                now_s = self._clock()
                if failing_since_s is None:
                    failing_since_s = now_s
                    print(f"heartbeat of {self._status.instance}: {failure}", flush=True)
                if failure.errno not in (errno.ENOSPC, errno.EDQUOT) or now_s - failing_since_s >= _PATIENCE_S:
                    self._failure = failure
                    return
            else:
                failing_since_s = None

    def __enter__(self) -> Registration:
        self.update()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
