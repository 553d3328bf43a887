"""The attempts of a run: who started each, from which step, and whether another one by itself makes sense.

A Slurm job has a base attempt, the one that was submitted with it; each time Slurm runs the job again (SLURM_RESTART_COUNT), the
attempt is one higher, and the supervisor starts it itself. From then on writers of older attempts are fenced out, and their
records count no more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from conf.schema import LibraConfig
from launch.cancel_request import CancelRequest, read_cancel_request
from launch.desired_steps import desired_steps
from launch.local import link_log
from planner.plan import Plan
from stages.checkpoint import newest
from stages.desired import read_desired, write_desired
from stages.files import list_names
from stages.rundir import FencedError, RunDir, RunNotFoundError

AUTOMATIC = ("requeue", "chain", "node_failure")
"""Reasons of attempts that nobody asked for; "first" and "resume" are a person's."""


@dataclass(frozen=True)
class Attempt:
    """`resumed_step` is the step of the checkpoint that it started from, 0 without one; `previous` is -1 for the first."""

    number: int
    job_id: str
    resumed_step: int
    reason: str
    previous: int

    @property
    def is_automatic(self) -> bool:
        return self.reason in AUTOMATIC


def history(run: RunDir) -> list[Attempt]:
    """All attempts that left a record, in order."""
    found = []
    for number in sorted(int(name) for name in list_names(run.root / "attempts") if name.isdigit()):
        record = run.read(replace(run, attempt=number).attempt_json, any_attempt=True)
        if record is not None:
            found.append(
                Attempt(
                    number,
                    str(record.get("job_id", "")),
                    int(record["resumed_step"]),
                    str(record["reason"]),
                    int(record["previous"]),
                )
            )
    return found


def newest_step(run: RunDir) -> int:
    """The step that an attempt started now would go on from."""
    checkpoint = newest(run)
    return 0 if checkpoint is None else checkpoint.step


def refusal(attempts: Sequence[Attempt], max_restarts: int, max_without_progress: int) -> str:
    """Why the last of `attempts` must not be; "" when it may. Only what happened since a person last started one counts."""
    by_hand = max((index for index, attempt in enumerate(attempts) if not attempt.is_automatic), default=0)
    series = attempts[by_hand:]
    idle = 0
    for before, after in reversed(list(pairwise(series))):
        if after.resumed_step > before.resumed_step:
            break
        idle += 1
    if idle > max_without_progress:
        first, step = series[-1 - idle].number, series[-1].resumed_step
        return (
            f"no progress: since attempt {first} no checkpoint was saved beyond step {step}, so it is not started again"
            f" (launch.max_restarts_without_progress={max_without_progress}); raise slurm.time_min or lower save_interval, and"
            " go on with: python -m launch.resume RUN"
        )
    if len(series) - 1 > max_restarts:
        return (
            f"it was started again {max_restarts} times by itself (launch.max_restarts);"
            " go on with: python -m launch.resume RUN"
        )
    return ""


def cancelled_before(run: RunDir) -> CancelRequest | None:
    """What people asked the attempt before of, when this one has started by itself all the same: the request came while Slurm
    took the job back, when nobody could act on it any more. Raises CancelRequestError, DamagedRecordError."""
    this = next((attempt for attempt in reversed(history(run)) if attempt.number == run.attempt), None)
    if this is None or not this.is_automatic or this.previous < 0:
        return None
    return read_cancel_request(replace(run, attempt=this.previous))


def next_refusal(run: RunDir, config: LibraConfig) -> str:
    """Why another attempt after this one must not be started by itself; "" when it may."""
    upcoming = Attempt(run.attempt + 1, "", newest_step(run), "requeue", run.attempt)
    limits = config.launch
    return refusal([*history(run), upcoming], limits.max_restarts, limits.max_restarts_without_progress)


def begin(base: RunDir, config: LibraConfig, *, mode: str, job_id: str, restarts: int, reason: str) -> RunDir:
    """The supervisor's first act: the run as its attempt sees it, with attempt.json written.

    `base` is opened at the job's base attempt, `reason` says how that came about. Raises FencedError when a newer attempt
    exists: somebody resumed the run while this job waited.
    """
    run = replace(base, attempt=base.attempt + restarts)
    run.check_fence()
    if restarts:
        reason = _start_again(run, base, mode=mode, job_id=job_id)
    if read_desired(run) is None:
        write_desired(run, desired_steps(config, read_plan(run)))
    if run.read(run.attempt_json) is None:
        older = [int(name) for name in list_names(run.root / "attempts") if name.isdigit() and int(name) < run.attempt]
        record = {
            "job_id": job_id,
            "resumed_step": newest_step(run),
            "reason": reason,
            "previous": max(older, default=-1),
        }
        run.write(run.attempt_json, record)
    return run


def _start_again(run: RunDir, base: RunDir, *, mode: str, job_id: str) -> str:
    """Folders and records of an attempt that Slurm started; returns its reason."""
    if run.newest_attempt() == run.attempt:
        raise FencedError(f"attempt {run.attempt} of {run.root} has been started already, by another job than {job_id}")
    before = replace(base, attempt=run.newest_attempt())
    said = before.read(before.state_json) or {}
    run.start_attempt(run.attempt)
    log = base.logs / "supervisor.log"
    (run.logs / "supervisor.log").symlink_to(os.path.relpath(log, run.logs))
    link_log(run.submitit, job_id)
    run.write(run.submission_json, {"mode": mode, "job_id": job_id})
    return _reason(said)


def _reason(said: Mapping[str, object]) -> str:
    """From what the attempt before said: without a word about its end, or with Slurm's own reason, the machine failed.

    The word about its stop counts also when there was no time for a last one.
    """
    stop = said.get("stop")
    if isinstance(stop, Mapping):
        return "node_failure" if stop.get("kind") == "node_failure" else "requeue"
    return "requeue" if said.get("phase") in ("failed", "succeeded") else "node_failure"


def read_plan(run: RunDir) -> Plan:
    """Raises RunNotFoundError."""
    record = run.read(run.plan_json, any_attempt=True)
    if record is None:
        raise RunNotFoundError(f"{run.root} has no plan.json; a run is made by `python -m launch`")
    return Plan.from_dict(record)
