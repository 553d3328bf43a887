"""Stay with a run until it ends: show progress, notice a death, say the cause, return the exit code."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from launch.display import Display, show
from launch.errors import RunFailedError
from launch.metrics import JsonLines, summary_text
from stages.files import list_names, read_json
from stages.rundir import RunDir

LOOK_INTERVAL_S = 0.25
QUEUE_INTERVAL_S = 2.0
LAST_WORDS_S = 5.0
"""How long the supervisor's final state may take to appear after its job has left the queue."""


class Submission(Protocol):
    """What `launch.executors.submit` returns."""

    mode: str
    job_id: str

    def poll(self) -> tuple[str, str]:
        """("pending" | "running" | "succeeded" | "failed" | "unknown", reason)"""
        ...

    def cancel(self) -> None: ...


def follow(run: RunDir, submission: Submission, display: Display, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when the run has succeeded; raises RunFailedError with the first fatal cause otherwise."""
    metrics = JsonLines(run.metrics_jsonl)
    notes = Notes(display)
    asked_s, status, reason, gone_s = -QUEUE_INTERVAL_S, "pending", "", 0.0
    while True:
        state = run.read(run.state_json) or {}
        notes.stages(run, state)
        for record in metrics.new():
            show(display, record)
        if state.get("phase") in ("succeeded", "failed"):
            return finish(run, state)
        now = time.monotonic()
        if now - asked_s >= QUEUE_INTERVAL_S:
            asked_s, (status, reason) = now, submission.poll()
            notes.queue(submission, status, reason)
        if status not in ("succeeded", "failed"):
            gone_s = 0.0
        elif not gone_s:
            gone_s = now
        elif now - gone_s > LAST_WORDS_S:
            raise RunFailedError(vanished(run, submission, status, reason), 1)
        sleep(LOOK_INTERVAL_S)


def finish(run: RunDir, state: dict[str, Any]) -> None:
    if state["phase"] == "failed":
        cause = state.get("cause") or {"step": "supervisor", "message": "no cause was recorded", "exit_code": 1}
        raise RunFailedError(cause_text(run, cause), int(cause.get("exit_code") or 1))


def cause_text(run: RunDir, cause: dict[str, Any]) -> str:
    lines = [f"the run failed: {cause['step']}: {cause['message']}"]
    tail = str(cause.get("log_tail") or "").rstrip()
    if tail:
        lines += [f"last lines of {cause['step']}'s log:", *(f"  | {line}" for line in tail.splitlines())]
    lines.append(f"all logs: {run.logs}")
    return "\n".join(lines)


def vanished(run: RunDir, submission: Submission, status: str, reason: str) -> str:
    """The job is over and its supervisor left no last word: it was killed, or its node died."""
    where = f"job {submission.job_id}" if submission.mode == "slurm" else f"supervisor process {submission.job_id}"
    guess = "" if "exited" in reason else "; it was killed or its node was lost"
    return (
        f"the run failed: supervisor: {where} ended ({status}{f': {reason}' if reason else ''})"
        f" without a final state{guess}\nall logs: {run.logs}"
    )


def final_words(run: RunDir) -> str:
    summary = read_json(run.summary_json)
    return summary_text(summary, run.root) if summary else f"the run succeeded; no summary was written in {run.root}"


class Notes:
    """Says each change of the queue and of the stages once."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._said: set[str] = set()

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._display.note(text)

    def queue(self, submission: Submission, status: str, reason: str) -> None:
        if submission.mode == "slurm" and status == "pending":
            self._once(f"job {submission.job_id} is pending{f': {reason}' if reason else ''}")
        elif submission.mode == "slurm" and status == "running":
            self._once(f"job {submission.job_id} is running")

    def stages(self, run: RunDir, state: dict[str, Any]) -> None:
        for name, step in sorted((state.get("steps") or {}).items()):
            self._once(f"{name}: {step['state']}")
        for file_name in list_names(run.instances):
            record = run.read(run.instances / file_name)
            if record and record.get("state") in ("starting", "ready"):
                detail = "vLLM is starting" if record["state"] == "starting" else f"vLLM serves on {record['base_url']}"
                self._once(f"{record['instance']}: {detail}")
