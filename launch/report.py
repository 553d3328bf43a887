"""What `python -m launch.status` says about one run: the same facts as text and as JSON."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch import figures, waiting
from launch.doctor.wording import size
from launch.figures import Disk, Instance, Progress, Saved
from launch.metrics import duration, from_here
from launch.slurm import SlurmCommandError
from launch.truth import Truth
from stages.files import names_if_any

NAMED = 4
"""Instances that are named one by one; of more only those that are not as the others."""
HEAD = 12
LOG_LINES = 15


@dataclass(frozen=True)
class Attempt:
    """`phase` is its last word, "" when it left none."""

    number: int
    reason: str
    from_step: int
    job_id: str
    phase: str
    cause: str


@dataclass(frozen=True)
class Report:
    """Times are seconds; `elapsed_s` is from the run's creation to its last word, or to now."""

    root: str
    state: str
    why: str
    was: str
    stops_because: str
    mode: str
    job_id: str
    job_state: str
    waits_for: str
    nodes: tuple[str, ...]
    time_left_s: float | None
    attempts: tuple[Attempt, ...]
    restarts: dict[str, int]
    elapsed_s: float | None
    progress: Progress
    newest_version: int | None
    instances: tuple[Instance, ...]
    watched_s: float
    checkpoint: Saved
    disk: Disk
    cause: dict[str, Any]
    last_lines: tuple[str, ...]
    damage: tuple[str, ...]
    next: tuple[str, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def report(truth: Truth, *, now: float | None = None, disk_budget_s: float = figures.DISK_BUDGET_S) -> Report:
    """Looks at the files of the run once more, and at the queue when the job waits. Changes nothing."""
    now = time.time() if now is None else now
    folder = truth.folder
    progress = figures.progress(folder)
    checkpoint = figures.saved(folder, progress.done)
    cause = dict(folder.state.get("cause") or {})
    job = truth.job
    return Report(
        root=str(folder.root),
        state=truth.state,
        why=truth.why,
        was=truth.was,
        stops_because=str((folder.state.get("stop") or {}).get("reason") or ""),
        mode=folder.mode,
        job_id=folder.job_id,
        job_state=job.state if job else "",
        waits_for=_waits_for(truth, now),
        nodes=job.nodes if job and job.nodes else _hosts(truth),
        time_left_s=job.left_s if job and not _is_waiting(truth) else None,
        attempts=tuple(_attempts(truth)),
        restarts=_restarts(truth),
        elapsed_s=_elapsed_s(truth, now),
        progress=progress,
        newest_version=figures.newest_version(folder),
        instances=tuple(figures.instances(truth)),
        watched_s=truth.beats.watched_s,
        checkpoint=checkpoint,
        disk=figures.disk(folder.root, disk_budget_s),
        cause=cause,
        last_lines=tuple(_last_lines(truth, cause)),
        damage=truth.damage,
        next=tuple(next_commands(truth, progress, checkpoint, cause)),
    )


def _is_waiting(truth: Truth) -> bool:
    return truth.state in ("pending", "requeued")


def _waits_for(truth: Truth, now: float) -> str:
    if truth.job is None or not _is_waiting(truth):
        return ""
    try:
        in_front = waiting.ahead(truth.job)
    except SlurmCommandError:
        in_front = None
    return waiting.waiting_words(truth.job, in_front, now)


def _hosts(truth: Truth) -> tuple[str, ...]:
    """Where the newest attempt runs or ran, as far as its records tell."""
    steps = (truth.folder.state.get("steps") or {}).values()
    found = [str(host) for step in steps for host in step.get("hosts") or ()]
    found = found or [str(truth.folder.state.get("host") or ""), *(one.host for one in figures.instances(truth))]
    return tuple(dict.fromkeys(host for host in found if host))


def _attempts(truth: Truth) -> Iterable[Attempt]:
    for number in truth.folder.attempts:
        folder = truth.folder.seen_at(number)
        cause = folder.state.get("cause") or {}
        yield Attempt(
            number,
            str(folder.start.get("reason") or ("first" if number == 0 else "")),
            int(folder.start.get("resumed_step") or 0),
            folder.job_id,
            str(folder.state.get("phase", "")),
            f"{cause['step']}: {cause['message']}" if {"step", "message"} <= set(cause) else "",
        )


def _restarts(truth: Truth) -> dict[str, int]:
    """Step -> how often it was started again within the newest attempt."""
    steps = (truth.folder.state.get("steps") or {}).items()
    told = {name: int(step["restarts"]) for name, step in steps if step.get("restarts")}
    if told:
        return told
    starts: dict[str, int] = {}
    for event in figures.tail_records(truth.run.events_jsonl):
        if event.get("event") == "step" and event.get("state") == "running":
            name = str(event.get("name"))
            starts[name] = starts.get(name, 0) + 1
    return {name: count - 1 for name, count in starts.items() if count > 1}


def _elapsed_s(truth: Truth, now: float) -> float | None:
    created = truth.folder.identity.get("created")
    end = now if truth.is_alive else truth.folder.state.get("time")
    if not isinstance(created, int | float) or not isinstance(end, int | float):
        return None
    return max(0.0, float(end) - float(created))


def _last_lines(truth: Truth, cause: dict[str, Any]) -> list[str]:
    """Of the step that failed; of a supervisor without a last word its own log."""
    if cause.get("log_tail"):
        return str(cause["log_tail"]).splitlines()[-LOG_LINES:]
    if truth.state != "vanished" and not (truth.state == "half-deleted" and truth.was in ("", "vanished")):
        return []
    from launch.steps import tail, without_plumbing

    return without_plumbing(tail(truth.run.logs / "supervisor.log", lines=LOG_LINES))


# ---- what to do next -------------------------------------------------------------------------------------------------


def next_commands(truth: Truth, progress: Progress, checkpoint: Saved, cause: dict[str, Any]) -> list[str]:
    """Commands that make sense now, each with what it is for."""
    run = shlex.quote(from_here(truth.folder.root))
    if truth.is_alive:
        stop = f"python -m launch.cancel {run}"
        return [
            f"python -m launch.follow {run}        # stay with it; Ctrl-C leaves it running",
            f"{stop}{' --checkpoint' if truth.state == 'running' else ''}        # end it",
        ]
    if truth.state == "succeeded":
        return [f"python -m traces summary {run}        # where its time went"]
    if truth.state == "unknown":
        return [f"python -m launch.logs {run}        # what its stages said last"]
    step = str(cause.get("step") or "supervisor")
    look = f"python -m launch.logs {run} {shlex.quote(step)}        # what it said"
    has_log = bool(truth.folder.state or names_if_any(truth.run.logs))
    return [*([look] if has_log else []), *_go_on(truth, run, progress, checkpoint)]


def _go_on(truth: Truth, run: str, progress: Progress, checkpoint: Saved) -> list[str]:
    again = f"python -m launch --config-path {run} launch.run_dir=NEW        # the same run from its beginning"
    if truth.state == "half-deleted":
        return [] if any(entry.startswith("config.yaml") for entry in truth.damage) else [again]
    if checkpoint.step is not None and not (progress.total and checkpoint.step >= progress.total):
        return [f"python -m launch.resume {run}        # go on from step {checkpoint.step}"]
    return [again]


# ---- as text ---------------------------------------------------------------------------------------------------------


def text(said: Report) -> str:
    rows: list[tuple[str, str]] = [("state", _state(said))]
    rows += [("", f"missing or damaged: {entry}") for entry in said.damage]
    rows += [("attempt", _attempt(said)), ("job", _job(said))]
    rows += [("", f"waits: {said.waits_for}")] if said.waits_for else []
    rows += _training(said)
    rows += [("disk", f"{'' if said.disk.is_whole else 'at least '}{size(said.disk.bytes)}")]
    rows += _failure(said)
    rows += [("next" if index == 0 else "", command) for index, command in enumerate(said.next)]
    lines = [f"{head:<{HEAD}}{words}".rstrip() for head, words in rows if words]
    return "\n".join([from_here(Path(said.root)), *(f"  {line}" for line in lines)])


def headline(said: Report) -> str:
    """One line, for many runs."""
    progress = said.progress
    done = f"step {progress.done}/{progress.total}" if progress.total else ""
    cause = f"{said.cause['step']}: {said.cause['message']}".splitlines()[0] if said.cause.get("message") else ""
    parts = [done, said.waits_for or cause or said.why or ", ".join(said.damage)]
    return f"{from_here(Path(said.root))}: {said.state}{''.join(f', {part}' for part in parts if part)}"


def _state(said: Report) -> str:
    code = f" (exit code {said.cause['exit_code']})" if said.state == "failed" and said.cause.get("exit_code") else ""
    was = f" (otherwise: {said.was})" if said.was else ""
    stopping = (
        f": {said.stops_because}" if said.stops_because and said.state in ("running", "stopping", "requeued") else ""
    )
    elapsed = "" if said.elapsed_s is None else f", {duration(said.elapsed_s)} after it was made"
    return f"{said.state}{code}{was}{elapsed}{f': {said.why}' if said.why else stopping}"


def _attempt(said: Report) -> str:
    if not said.attempts:
        return ""
    last = said.attempts[-1]
    how = f"{last.number}"
    if last.number:
        how += f" ({last.reason or 'started again'}, from step {last.from_step}; before it: {_earlier(said.attempts[:-1])})"
    again = [f"{name} {count}x" for name, count in sorted(said.restarts.items())]
    return how + (f"; started again within it: {', '.join(again)}" if again else "")


def _earlier(attempts: Sequence[Attempt]) -> str:
    words = [f"{one.number} {one.phase or 'no last word'}{f' ({one.cause})' if one.cause else ''}" for one in attempts]
    return "; ".join(words[-3:])


def _job(said: Report) -> str:
    if not said.job_id:
        return ""
    what = f"local, process {said.job_id}" if said.mode == "local" else f"Slurm job {said.job_id}"
    what += " (a shell's: it outlives the run)" if said.mode == "allocation" else ""
    where = f" on {_few(said.nodes)}" if said.nodes else ""
    left = "" if said.time_left_s is None else f", {duration(said.time_left_s)} left of its time limit"
    return f"{what}{where}{left}"


def _training(said: Report) -> list[tuple[str, str]]:
    progress = said.progress
    rows = [("step", _steps(said))]
    if progress.reward is not None:
        rows.append(("reward", f"{progress.reward:.3f}, {progress.tokens_per_s or 0.0:,.0f} tokens/s"))
    rows += _weights(said)
    if progress.refresh_s is not None:
        rows.append(("refresh", f"{progress.refresh_s:.3f} s, the newest of all instances"))
    rows.append(("checkpoint", _checkpoint(said)))
    rows += [("", problem) for problem in said.checkpoint.damaged]
    if progress.seconds:
        times = sorted(progress.seconds.items(), key=lambda item: -item[1])
        of = f"of a step, mean of the last {progress.window}" if progress.window else "of the whole run"
        rows.append(("time", f"{of}: {', '.join(f'{name} {value:.2f} s' for name, value in times)}"))
    return rows


def _steps(said: Report) -> str:
    progress = said.progress
    if not progress.total and not progress.done:
        return ""
    words = f"{progress.done}/{progress.total or '?'}"
    if progress.step_s:
        words += f", {progress.step_s:.2f} s a step"
    if progress.eta_s is not None and said.state == "running":
        words += f", ETA {duration(progress.eta_s)}"
    return words


def _weights(said: Report) -> list[tuple[str, str]]:
    if said.newest_version is None and not said.instances:
        return []
    is_on = said.state in ("starting", "running", "stopping")
    newest = -1 if said.newest_version is None else said.newest_version
    current = [one for one in said.instances if one.version == newest and one.state == "ready" and one.beats]
    words = f"v{newest} is the newest" if newest >= 0 else "none published yet"
    if is_on:
        words += f"; {len(current)} of {len(said.instances)} instances serve it"
    rows = [("weights", words)]
    odd = [one for one in said.instances if one not in current] if len(said.instances) > NAMED else said.instances
    return rows + [("", _instance(one, said.watched_s)) for one in (odd if is_on else ())[: 4 * NAMED]]


def _instance(one: Instance, watched_s: float) -> str:
    beat = "" if one.beats is None else ", beats" if one.beats else f", no heartbeat in {watched_s:.1f} s"
    version = f" v{one.version}" if one.version >= 0 else ""
    return f"{one.name} {one.state}{version}{beat} ({one.host})"


def _checkpoint(said: Report) -> str:
    kept = said.checkpoint
    if kept.step is None:
        return "none" if said.progress.done else ""
    behind = "no step" if kept.behind == 0 else "1 step" if kept.behind == 1 else f"{kept.behind} steps"
    return f"step {kept.step}, {behind} trained since; {size(kept.bytes)}, saved in {kept.save_s:.2f} s"


def _failure(said: Report) -> list[tuple[str, str]]:
    rows = []
    if said.cause.get("message"):
        first, *more = f"{said.cause.get('step')}: {said.cause['message']}".splitlines()
        rows = [("cause", first), *(("", line) for line in more)]
    return rows + [("", f"| {line}") for line in said.last_lines]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= NAMED else f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"
