"""What the supervisor leaves on disk: state.json (now) and events.jsonl (how it came to that)."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from launch.verdict import Cause
from stages.rundir import FencedError, RunDir

HEARTBEAT_S = 1.0
LASTING_S = 30.0
"""A disk that is full for less long than this ends no run: others fill a shared one too, and it is emptied again."""
LAST_WORD_S = 10.0
"""How long the last record is tried for; a job that is being ended gets its KILL after KillWait (30 s by default)."""
_PAUSE_S = 0.2


class Journal:
    """Writes state.json at every change, and at least every HEARTBEAT_S with a counter that moves.

    phase: starting, running, stopping, then the last word: succeeded, failed, or requeued (the run goes on in another
    attempt). Never raises: steps must still be stopped on a full disk or when a newer attempt has fenced this one out. `trouble`
    then says what went wrong; what could not be written is written once it can.
    """

    def __init__(
        self,
        run: RunDir,
        mode: str,
        job_id: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._clock = clock
        self._sleep = sleep
        self._failure: OSError | FencedError | None = None
        self._failing_since_s = 0.0
        self._unwritten = b""
        self._about = {"mode": mode, "job_id": job_id, "host": socket.gethostname(), "pid": os.getpid()}
        self._phase = ""
        self._steps: dict[str, dict[str, Any]] = {}
        self._cause: Cause | None = None
        self._more: dict[str, Any] = {}
        self._heartbeat = 0
        self._written_s = float("-inf")
        self._events = os.open(run.events_jsonl, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @property
    def cause(self) -> Cause | None:
        return self._cause

    @property
    def trouble(self) -> OSError | FencedError | None:
        """Why the attempt cannot go on: a newer one has begun, or nothing could be written for LASTING_S."""
        is_lasting = isinstance(self._failure, FencedError) or self._clock() - self._failing_since_s >= LASTING_S
        return self._failure if is_lasting else None

    def close(self) -> None:
        """With the last record on disk, if need be after some tries."""
        end_s = self._clock() + LAST_WORD_S
        while isinstance(self._failure, OSError) and self._clock() < end_s:
            self._sleep(_PAUSE_S)
            self._write()
        os.close(self._events)

    def event(self, what: str, /, **details: Any) -> None:
        """One line in events.jsonl and in the supervisor's log."""
        line = json.dumps({"time": round(time.time(), 3), "event": what, **details})
        self._unwritten += f"{line}\n".encode()
        self._write_events()
        words = " ".join(f"{key}={value}" for key, value in details.items() if value is not None)
        print(f"{time.strftime('%H:%M:%S')} {what} {words}", flush=True)

    def phase(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self.event("phase", phase=phase)
            self._write()

    def step(self, name: str, **fields: Any) -> None:
        """Merge `fields` into the step's entry: state, pid, hosts, exit_code, started, ended; restarts and reason of the last.

        state: running, stopping, then stopped, ended or failed; waiting (for its next start), lost (given up).
        """
        self._steps.setdefault(name, {}).update(fields)
        self.event("step", name=name, **fields)
        self._write()

    def forget(self, name: str) -> None:
        self._steps.pop(name, None)

    def note(self, **fields: Any) -> None:
        """Further facts in state.json: `stop` (why the attempt is being ended), `next` (how the run goes on)."""
        self._more.update(fields)
        self._write()

    def fatal(self, cause: Cause) -> None:
        """Record the first fatal cause; a later one is an event only."""
        self.event("fatal" if self._cause is None else "also", step=cause.step, kind=cause.kind, message=cause.message)
        if self._cause is None:
            self._cause = cause
            self._write()

    def beat(self) -> None:
        if self._clock() - self._written_s >= HEARTBEAT_S:
            self._write()

    def _write(self) -> None:
        self._heartbeat += 1
        self._written_s = self._clock()
        cause = asdict(self._cause) if self._cause else None
        payload = {
            "phase": self._phase,
            "steps": self._steps,
            "cause": cause,
            "heartbeat": self._heartbeat,
            **self._more,
        }
        try:
            self._run.write(self._run.state_json, {**payload, **self._about, "time": time.time()})
        except (OSError, FencedError) as error:
            self._failed(error)
        else:
            self._write_events()
            if not self._unwritten:
                self._failure = None

    def _write_events(self) -> None:
        """A full disk may take a part of it; the rest follows later."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._events, self._unwritten) :]
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError | FencedError) -> None:
        if self._failure is None:
            self._failing_since_s = self._clock()
            print(f"the state cannot be recorded: {error}", flush=True)
        self._failure = error
