"""The end of a job that has lost its supervisor.

An ordinary job with --no-kill outlives the loss of its first node, and there the supervisor runs: on 22.05 the job then stays
RUNNING until its limit, with instances that nobody asks (tried). So the instances look after it: when the supervisor's heartbeat
stands still and Slurm says that the job has lost its batch host, they have the job run again, or end it. Slurm takes the second
such wish for an error, so it does not matter how many of them ask.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stages.context import StageContext
from stages.rundir import RunDir

SILENT_S = 60.0
LOOK_S = 10.0
COMMAND_TIMEOUT_S = 30.0
LAST_WORDS = ("succeeded", "failed", "requeued")

Ask = Callable[[Sequence[str]], str]


class SupervisorLostError(RuntimeError):
    """The supervisor is gone with its node, and the job with it."""


def ask_slurm(words: Sequence[str]) -> str:
    """stdout of a Slurm command; empty when it fails or does not answer, which says nothing."""
    try:
        done = subprocess.run(
            list(words),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{words[0]}: {error}", flush=True)
        return ""
    if done.returncode != 0:
        print(f"{words[0]} failed ({done.returncode}): {done.stderr.strip()}", flush=True)
    return done.stdout if done.returncode == 0 else ""


@dataclass
class SupervisorWatch:
    """Call `look` now and then. `job_id` is empty where there is nothing to watch; `again`: the job may be requeued."""

    run: RunDir
    job_id: str
    again: bool
    silent_s: float = SILENT_S
    clock: Callable[[], float] = time.monotonic
    ask: Ask = ask_slurm
    _beat: int = -1
    _beat_s: float = 0.0
    _next_look_s: float = float("-inf")

    @classmethod
    def of(cls, context: StageContext) -> SupervisorWatch:
        outlives = context.plan.layout == "single"
        again = context.config.slurm.requeue in ("auto", "requeue")
        return cls(context.run, os.environ.get("SLURM_JOB_ID", "") if outlives else "", again)

    def look(self) -> None:
        """Raises SupervisorLostError when the supervisor is lost; the job then ends, or is requeued."""
        now_s = self.clock()
        if not self.job_id or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + min(LOOK_S, self.silent_s)
        if not self._is_silent(now_s) or not self._is_lost():
            return
        print(
            f"the supervisor is lost with its node: job {self.job_id} is {'requeued' if self.again else 'ended'}",
            flush=True,
        )
        self.ask(["scontrol", "requeue", self.job_id] if self.again else ["scancel", self.job_id])
        raise SupervisorLostError(f"the supervisor of job {self.job_id} is lost with its node")

    def _is_silent(self, now_s: float) -> bool:
        state = self.run.read(self.run.state_json) or {}
        beat = int(state.get("heartbeat", -1))
        if beat != self._beat:
            self._beat, self._beat_s = beat, now_s
        return beat >= 0 and state.get("phase") not in LAST_WORDS and now_s - self._beat_s >= self.silent_s

    def _is_lost(self) -> bool:
        """Only Slurm's word counts: a supervisor may be silent for the filesystem's sake."""
        batch_host, _, nodes = self.ask(["squeue", "-h", "-j", self.job_id, "-o", "%B|%N"]).strip().partition("|")
        if not batch_host or not nodes:
            return False
        hosts = self.ask(["scontrol", "show", "hostnames", nodes]).split()
        return bool(hosts) and batch_host not in hosts
