"""What squeue says to someone who waits: the reason in words, who comes first, when Slurm expects the job to start.

The states themselves are `launch.slurm`'s. Text formats only, as there; of a hetjob every component is a line of its own.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from launch import slurm
from launch.metrics import duration
from launch.slurm import JobPhase

FORMAT = "%i|%T|%r|%N|%S|%L|%Q|%P"
AHEAD_FORMAT = "%i|%Q|%r"
_NO_TIME = ("", "N/A", "NONE", "UNKNOWN", "INVALID")

REASONS: Mapping[str, str] = {
    "Resources": "waiting for free nodes",
    "Priority": "other jobs come first",
    "None": "Slurm has not looked at it yet",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": "it will never start, the job that it waits for ended another way: cancel it",
    "BeginTime": "not before its begin time; a requeued job waits a few minutes",
    "JobHeldUser": "held by its owner: scontrol release {job}",
    "JobHeldAdmin": "held by an administrator",
    "Licenses": "waiting for licences",
    "Reservation": "waiting for its reservation",
    "Prolog": "nodes are being prepared",
    "Cleaning": "its earlier nodes are being cleaned up",
    "PartitionDown": "the partition takes jobs but starts none",
    "PartitionInactive": "the partition is inactive: choose another slurm.partition",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives or has up: lower train_gpus or rollout_gpus",
    "PartitionTimeLimit": "slurm.time_min is above the partition's limit",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node has what it asks for: change slurm.extra or slurm.partition",
    "AccountNotAllowed": "the partition is not for this account: change slurm.account",
    "QOSNotAllowed": "the QOS is not allowed here: change slurm.qos",
    "InvalidAccount": "the account is not valid: change slurm.account",
    "InvalidQOS": "the QOS is not valid: change slurm.qos",
}
PREFIXES: Mapping[str, str] = {
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "QOS": "a limit of the QOS is reached; it starts when other jobs of it end",
    "Assoc": "a limit of the account is reached; it starts when other jobs of it end",
    "Max": "a limit of the cluster is reached; it starts when other jobs end",
    "launch failed requeued held": "a node failed to start it and Slurm holds it: scontrol release {job}",
    "job requeued in held state": "Slurm holds it: scontrol release {job}",
}
"""Reasons that come in many forms (QOSMaxJobsPerUserLimit, AssocGrpNodeLimit, ReqNodeNotAvail, UnavailableNodes:n1)."""
NOT_COMPETING = ("Dependency", "BeginTime", "JobHeld", "launch failed", "job requeued")
"""Jobs that wait for something of their own are not in front of anybody, whatever their priority."""


def reason_words(reason: str, job: int | str) -> str:
    """Slurm's reason with what it means: "Resources (waiting for free nodes)"; just Slurm's word where we know no better."""
    meaning = REASONS.get(reason) or next((words for head, words in PREFIXES.items() if reason.startswith(head)), "")
    named = "no reason yet" if reason in ("", "None") else reason
    return f"{named} ({meaning.format(job=job)})" if meaning else named


@dataclass(frozen=True)
class QueuedJob:
    """A job that squeue shows, all its components together.

    `start` is when it started, or when Slurm expects the last of its components to (wall clock, s); None when Slurm does not
    say. `left_s`: rest of its time limit, None for none. `priority` is the leader's.
    """

    job_id: int
    state: str
    reason: str
    nodes: tuple[str, ...]
    start: float | None
    left_s: float | None
    priority: int
    partitions: tuple[str, ...]

    @property
    def phase(self) -> JobPhase:
        return slurm.job_phase(self.state)


def parse(text: str) -> dict[int, QueuedJob]:
    """Lines of `squeue -h -o FORMAT` as leader's job id -> job; lines of other shapes are skipped."""
    found: dict[int, list[tuple[int, list[str]]]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        name = re.fullmatch(r"(\d+)(?:\+(\d+))?", cells[0])
        if name and len(cells) == FORMAT.count("|") + 1:
            found.setdefault(int(name[1]), []).append((int(name[2] or 0), cells[1:]))
    return {job: _folded(job, [cells for _, cells in sorted(lines)]) for job, lines in found.items()}


def _folded(job: int, components: Sequence[Sequence[str]]) -> QueuedJob:
    """State and priority are the leader's, as in `slurm.fold`. Of several reasons the first that says something."""
    state, _, _, _, _, priority, _ = components[0]
    reasons = [cells[1] for cells in components]
    starts = [when(cells[3]) for cells in components]
    lefts = [left for cells in components if (left := seconds(cells[4])) is not None]
    partitions = dict.fromkeys(name for cells in components for name in cells[6].split(",") if name)
    return QueuedJob(
        job_id=job,
        state=state,
        reason=next((reason for reason in reasons if reason not in ("", "None")), reasons[0]),
        nodes=tuple(host for cells in components for host in _hosts(cells[2])),
        start=None if None in starts else max(start for start in starts if start is not None),
        left_s=min(lefts, default=None),
        priority=int(priority) if priority.isdigit() else 0,
        partitions=tuple(partitions),
    )


def _hosts(nodelist: str) -> list[str]:
    """What Slurm would not call a node list is shown as it is: here it is only for people."""
    try:
        return slurm.expand_nodes(nodelist)
    except ValueError:
        return [nodelist]


def when(text: str) -> float | None:
    """Slurm's "2026-11-30T01:41:14" (local time) as seconds of the wall clock; None for "N/A"."""
    if text.upper() in _NO_TIME:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def seconds(text: str) -> float | None:
    """Slurm's "1-02:03:04", "2:57" as seconds; None for "UNLIMITED", "INVALID", "NOT_SET"."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def queued(job_ids: Iterable[int | str]) -> dict[int, QueuedJob]:
    """One squeue for all of them; jobs that it does not show are left out. Raises SlurmCommandError when Slurm does not answer."""
    wanted = sorted({int(job) for job in job_ids})
    if not wanted:
        return {}
    try:
        text = slurm.command(["squeue", "-h", "-t", "all", "-j", ",".join(map(str, wanted)), "-o", FORMAT])
    except slurm.SlurmCommandError as error:
        if "invalid job id" in str(error).lower():  # of one job; of several, squeue leaves out what it does not know
            return {}
        raise
    return {job: found for job, found in parse(text).items() if job in wanted}


def ahead(job: QueuedJob) -> int | None:
    """Pending jobs of higher priority in its partitions, as far as this user may see them; None when it is held itself.

    Raises SlurmCommandError.
    """
    if job.priority == 0 or not job.partitions:
        return None
    text = slurm.command(["squeue", "-h", "-t", "PENDING", "-p", ",".join(job.partitions), "-o", AHEAD_FORMAT])
    return count_ahead(text, job)


def count_ahead(text: str, job: QueuedJob) -> int:
    """Of lines `squeue -h -t PENDING -o AHEAD_FORMAT`; the components of a hetjob count once."""
    others = set()
    for line in text.splitlines():
        name, priority, reason = (cell.strip() for cell in f"{line}||".split("|")[:3])
        leader = name.partition("+")[0].partition("_")[0]
        if leader != str(job.job_id) and priority.isdigit() and int(priority) > job.priority:
            others.add(leader if not reason.startswith(NOT_COMPETING) else "")
    return len(others - {""})


def waiting_words(job: QueuedJob, in_front: int | None, now: float) -> str:
    """ "Resources (waiting for free nodes); 3 jobs come first in partition gpu; Slurm expects it to start at 14:05, in 1:10:00"."""
    parts = [reason_words(job.reason, job.job_id)]
    if in_front is not None:
        many = "no job comes" if in_front == 0 else "1 job comes" if in_front == 1 else f"{in_front} jobs come"
        parts.append(f"{many} first in partition {','.join(job.partitions)}")
    if job.start is not None:
        parts.append(start_words(job.start, now))
    return "; ".join(parts)


def start_words(start: float, now: float) -> str:
    if start <= now:
        return "Slurm expects it to start any moment"
    day = "%H:%M" if start - now < 20 * 3600 else "%a %d %b %H:%M"
    return f"Slurm expects it to start at {time.strftime(day, time.localtime(start))}, in {duration(start - now)}"


def verdict(job_id: int | str) -> str:
    """What accounting says of a job that nothing else knows any more: "FAILED, exit code 7"; "" where there is none."""
    try:
        text = slurm.command(["sacct", "-n", "-X", "-P", "-j", str(job_id), "-o", "State,ExitCode"])
    except slurm.SlurmCommandError:
        return ""
    state, _, code = (text.splitlines() or [""])[0].partition("|")
    return slurm.ComponentState(int(job_id), 0, state.strip(), exit_code=code.strip()).text if state else ""


class Pace:
    """When the next query may go: after `first_s`, then at growing intervals up to `last_s`. Never faster, whoever asks."""

    def __init__(
        self,
        first_s: float = 2.0,
        last_s: float = 30.0,
        growth: float = 1.4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s, self._last_s, self._growth, self._clock = first_s, last_s, growth, clock
        self._pause_s = first_s
        self._asked_s = -math.inf

    def due(self) -> bool:
        """True at most once in each interval: who is told so asks now."""
        now_s = self._clock()
        if now_s - self._asked_s < self._pause_s:
            return False
        if self._asked_s > -math.inf:
            self._pause_s = min(self._pause_s * self._growth, self._last_s)
        self._asked_s = now_s
        return True

    def hurry(self) -> None:
        """Something happened: ask at the first interval again."""
        self._pause_s = self._first_s
