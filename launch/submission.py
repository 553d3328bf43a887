"""A submitted run, as its launcher sees it: pending, running, over, and why."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from submitit.slurm.slurm import SlurmJob

from launch import slurm
from launch.life import Life, LocalLife, SlurmLife
from launch.slurm import JobPhase, signal_name
from launch.steps import UNREADABLE, exception_text, tail
from launch.sweep import sweep
from stages.rollout.node_folder import remove_node_folder
from stages.rundir import RunDir

QUEUE_FIRST_S = 1.0
QUEUE_LAST_S = 10.0
STALLED_S = 4.0
"""A supervisor whose heartbeat stands still this long is asked about at once."""
SAID = "the run failed: supervisor: "
"""How the last line of a supervisor begins that failed itself (`launch.supervise.exit_with_own_code`)."""
HUNG_S = 60.0
"""A local supervisor whose heartbeat stands still this long is ended: nobody else could, and its run would never end."""


class Pulse:
    """How long the heartbeat in state.json has stood still, on this process's clock; 0 before the first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._beat, self._seen_s = -1, clock()

    def still_s(self, state: dict[str, Any]) -> float:
        beat, now_s = int(state.get("heartbeat", -1)), self._clock()
        if beat != self._beat:
            self._beat, self._seen_s = beat, now_s
        return now_s - self._seen_s if beat >= 0 else 0.0


class Submission(ABC):
    """A submitted run. `poll` is cheap enough for every second; `exit_code` is what the launcher should return."""

    mode: str
    is_own = False
    """It lives only as long as the launcher: Ctrl-C ends it."""

    def __init__(self, run: RunDir, job_id: str) -> None:
        self.run = run
        self.job_id = job_id

    def poll(self) -> tuple[str, str]:
        """("pending" | "running" | "succeeded" | "failed" | "unknown", reason). The supervisor's last word counts most."""
        return self._last_word() or self._ask()

    @property
    def exit_code(self) -> int:
        """0 after success, the first fatal cause's own code after a failure, 1 when there is none."""
        state = self.run.read(self.run.state_json) or {}
        if state.get("phase") == "succeeded":
            return 0
        return int((state.get("cause") or {}).get("exit_code") or 1)

    @abstractmethod
    def cancel(self) -> None:
        """Ask the supervisor to end the run; returns at once."""

    @abstractmethod
    def life(self) -> Life:
        """What following it looks at."""

    @abstractmethod
    def _ask(self) -> tuple[str, str]:
        """The state of a job whose supervisor has not said its last word."""

    def _last_word(self) -> tuple[str, str] | None:
        state = self.run.read(self.run.state_json) or {}
        if state.get("phase") == "succeeded":
            return "succeeded", ""
        if state.get("phase") == "failed":
            cause = state.get("cause") or {"step": "supervisor", "message": "no cause was recorded"}
            return "failed", f"{cause['step']}: {cause['message']}"
        return None

    def _sweep(self) -> None:
        """The steps died with their supervisor; on this host, end what had left its parents behind."""
        sweep(f"{self.run.run_id}.{self.run.attempt}.")
        remove_node_folder(self.run.run_id)

    def _supervisor_error(self, otherwise: str) -> str:
        """Why a supervisor ended without recording it (it could not start, or not write any more), from its log."""
        lines = tail(self.run.logs / "supervisor.log", lines=200)
        said = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]
        unreadable = ["; ".join(filter(None, (otherwise, line))) for line in lines if line.startswith(UNREADABLE)]
        return exception_text(lines) or "".join((said or unreadable)[-1:]) or otherwise


class SlurmSubmission(Submission):
    mode = "slurm"

    def __init__(self, run: RunDir, job: SlurmJob[Any], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(run, str(job.job_id))
        self.job = job
        self._clock = clock
        self._answer: tuple[str, str] = ("pending", "")
        self._asked_s = float("-inf")
        self._pause_s = QUEUE_FIRST_S
        self._pulse = Pulse(clock)

    def life(self) -> Life:
        return SlurmLife()

    def cancel(self) -> None:
        """TERM to the supervisor of a running job (it stops the steps in order); a pending job is just removed."""
        if self._ask_queue()[0] == "running":
            slurm.signal_batch(int(self.job_id), "TERM")
        else:
            slurm.cancel_job(int(self.job_id))

    def _ask(self) -> tuple[str, str]:
        """Asks Slurm at growing intervals (1 s to 10 s), and at once when the heartbeat stands still."""
        now_s = self._clock()
        is_stalled = self._pulse.still_s(self.run.read(self.run.state_json) or {}) > STALLED_S
        waited_s = now_s - self._asked_s
        if waited_s >= self._pause_s or (is_stalled and waited_s >= QUEUE_FIRST_S):
            self._asked_s, self._pause_s = now_s, min(self._pause_s * 1.5, QUEUE_LAST_S)
            self._answer = self._ask_queue()
        return self._answer

    def _ask_queue(self) -> tuple[str, str]:
        try:
            components = slurm.query(int(self.job_id))
        except slurm.SlurmCommandError as error:
            return "unknown", str(error)
        if not components:
            return self._last_word() or (
                "failed",
                "Slurm does not know the job any more, and the supervisor left no last word",
            )
        folded = slurm.fold(components)
        if folded.phase.is_over:
            self._sweep()
            return self._last_word() or ("failed", f"supervisor: {self._supervisor_error(folded.text)}")
        reason = folded.reason if folded.phase is JobPhase.PENDING and folded.reason != "None" else ""
        return folded.phase.value, reason


class ChildJob(Protocol):
    """A supervisor that this process has started. `exit_status` is None while it runs, -n or 128 + n after signal n."""

    @property
    def job_id(self) -> str: ...

    def exit_status(self) -> int | None: ...

    def cancel(self) -> None: ...


class LocalSubmission(Submission):
    mode = "local"
    is_own = True

    def __init__(self, run: RunDir, job: ChildJob, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(run, str(job.job_id))
        self.job = job
        self._pulse = Pulse(clock)
        self._hung = ""

    def life(self) -> Life:
        return LocalLife(self)

    def cancel(self) -> None:
        self.job.cancel()

    def _ask(self) -> tuple[str, str]:
        code = self.job.exit_status()
        if not self._hung and (code is None or (code < 0 and self._supervisor_lives())):
            state = self.run.read(self.run.state_json) or {}
            if self._pulse.still_s(state) <= HUNG_S:
                return "running", ""
            self._hung = f"hung: its heartbeat stood still for {HUNG_S:g} s; it was killed"
            os.kill(int(state["pid"]), signal.SIGKILL)  # and with it its steps
        self._sweep()
        if self._hung or code is None:
            return "failed", f"supervisor: {self._hung}"
        how = f"killed by {signal_name(abs(code) % 128)}" if code < 0 or code > 128 else f"exited {code}"
        words = self._supervisor_error("")
        return self._last_word() or ("failed", f"supervisor: {how}{f': {words}' if words else ''}")

    def _supervisor_lives(self) -> bool:
        """A supervisor whose parent was killed stops its steps and says its last word first."""
        pid = int((self.run.read(self.run.state_json) or {}).get("pid", 0))
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return pid > 0
