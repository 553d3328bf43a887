"""What state a run is in: from its files, from counters that move, and where these say nothing from Slurm or from /proc.

Nobody's clock is compared with another's. A supervisor or an instance lives while the counter in its record moves; its last word
in state.json outlives the job, Slurm's memory of it (MinJobAge) and its launcher.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch import slurm, unrecorded, waiting
from launch.occupancy import process_start
from launch.runs import Folder, NotARunError
from launch.slurm import JobPhase
from launch.waiting import QueuedJob
from stages.files import names_if_any
from stages.rundir import RunDir

LOOK_S = 1.5
"""How long counters are watched. Supervisors and instances raise theirs every second."""
LOOK_PAUSE_S = 0.1
SILENT_S = 4.0
"""Whoever stays with a run asks elsewhere when the supervisor's counter has stood still this long."""
ENDED = ("succeeded", "failed")
"""Phases that are a run's last word; "requeued" is an attempt's."""
IN_JOBS = ("slurm", "allocation")
"""Modes of runs that end with a Slurm job: their own, or that of a shell (salloc), which may outlive the run."""
ALIVE = ("pending", "starting", "running", "stopping", "requeued")
OVER = (*ENDED, "vanished")
STATES = (*ALIVE, *OVER, "half-deleted", "unknown")
GOOD = (*ALIVE, "succeeded")
UNRECORDED = (
    "its launcher ended before it had written down job {job}, which cannot work without that: it fails a minute after its"
    " start, so cancel it"
)


@dataclass(frozen=True)
class Beats:
    """Which counters moved while they were watched. `supervisor` is None when there was none to watch."""

    supervisor: bool | None = None
    instances: Mapping[str, bool] = field(default_factory=dict)
    watched_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """Slurm about a job. kind: "queued" (`job` says how), "over" (`text` says how), "forgotten", or "silent" (`text` says why)."""

    kind: str
    text: str = ""
    job: QueuedJob | None = None


@dataclass(frozen=True)
class Facts:
    """What is known about the newest attempt. `process` is "here", "gone" or "elsewhere": the supervisor of a local run, or
    before it has reported the launcher; "" when no process is written down. `cancelled_by` is "" unless someone cancelled.
    `is_unrecorded`: the launcher ended between Slurm's acceptance of the job and the record of its number."""

    phase: str = ""
    mode: str = ""
    job_id: str = ""
    beats: Beats = Beats()
    answer: Answer | None = None
    process: str = ""
    host: str = ""
    cancelled_by: str = ""
    is_unrecorded: bool = False


@dataclass(frozen=True)
class Truth:
    """`why` is a sentence for people, often empty. `was` is the state that a half-deleted run would have if it were whole,
    "" when what says so is missing."""

    folder: Folder
    state: str
    why: str = ""
    was: str = ""
    beats: Beats = Beats()
    job: QueuedJob | None = None
    damage: tuple[str, ...] = ()

    @property
    def run(self) -> RunDir:
        return self.folder.run

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE

    @property
    def exit_code(self) -> int:
        return 0 if self.state in GOOD else 1


def tell(roots: Sequence[Path], *, also_over: bool = False) -> list[Truth]:
    """The truth about each run; all are watched together, and Slurm is asked once for all. `also_over` is that of `watch`.

    Raises NotARunError.
    """
    seen = watch([Folder.at(root) for root in roots], look_s=LOOK_S, also_over=also_over)
    folders = [Folder.at(root) for root in roots]  # anew: a last word may have come meanwhile
    silent = _find_unrecorded(folders)
    asked = {folder.job_id for folder in folders if folder.mode in IN_JOBS and folder.state.get("phase") not in ENDED}
    answers = ask({job_id for job_id in asked if job_id.isdigit()})
    answers |= {"": Answer("silent", silent)} if silent else {}
    return [_truth(folder, seen.get((folder.root, folder.run.attempt), Beats()), answers) for folder in folders]


def _find_unrecorded(folders: Sequence[Folder]) -> str:
    """Fill in the jobs that a killed launcher did not write down; returns why Slurm could not be asked, "" when it was."""
    lost = {folder.run.submitit: folder for folder in folders if _may_be_unrecorded(folder)}
    try:
        for path, job_id in unrecorded.find(lost).items():
            lost[path].unrecorded_job = job_id
    except slurm.SlurmCommandError as error:
        return str(error)
    return ""


def _may_be_unrecorded(folder: Folder) -> bool:
    """Its launcher came as far as sbatch, nobody has reported since, and the launcher does not live (or is not of this host)."""
    if folder.state or folder.submission or folder.start.get("job_id") or not unrecorded.scripts(folder.run.submitit):
        return False
    return process_of(folder)[0] not in ("", "here")


def tell_one(root: Path, *, also_over: bool = False) -> Truth:
    return tell([root], also_over=also_over)[0]


def readable(roots: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Those that `tell` can look at, and why it cannot look at the others (another layout, say)."""
    fine: list[Path] = []
    problems: list[str] = []
    for root in roots:
        try:
            Folder.at(root)
        except NotARunError as error:
            problems.append(str(error))
        else:
            fine.append(root)
    return fine, problems


def _truth(folder: Folder, beats: Beats, answers: Mapping[str, Answer]) -> Truth:
    answer = answers.get(folder.job_id) if folder.mode in IN_JOBS or _may_be_unrecorded(folder) else None
    state, why = decide(facts_of(folder, beats, answer))
    is_submitted = bool(folder.submission or folder.state)
    damage = tuple(folder.look_for_damage(is_whole=is_submitted))
    truth = Truth(folder, state, why, "", beats, answer.job if answer else None, damage)
    if not damage or truth.is_alive:
        return truth
    if state == "vanished" and _is_last_word_lost(folder):
        return replace(truth, state="half-deleted", why="the record that would say how it ended is not there")
    return replace(truth, state="half-deleted", was=state)


def _is_last_word_lost(folder: Folder) -> bool:
    """No word is there, and that need not be because none was said: its file, or the whole attempt, was taken away."""
    lost = f"{folder.run.state_json.relative_to(folder.root)} ("
    return not folder.attempts or any(entry.startswith(lost) for entry in folder.damage)


def facts_of(folder: Folder, beats: Beats, answer: Answer | None) -> Facts:
    state = folder.state
    process, host = process_of(folder)
    cancel = folder.record(folder.run.cancel_json) or {}
    return Facts(
        phase=str(state.get("phase", "")),
        mode=folder.mode,
        job_id=folder.job_id,
        beats=beats,
        answer=answer,
        process=process,
        host=host,
        cancelled_by=str(cancel.get("by", "")),
        is_unrecorded=_may_be_unrecorded(folder),
    )


def decide(facts: Facts) -> tuple[str, str]:
    """(state, why). Pure."""
    if facts.phase in ENDED:
        return facts.phase, ""
    if facts.beats.supervisor:
        return facts.phase, ""
    if facts.mode == "slurm":
        state, why = _by_job(facts, facts.answer or Answer("silent", "it was not asked"))
        is_lost = facts.is_unrecorded and facts.process == "gone" and state in ALIVE
        return state, "; ".join([*filter(None, [why]), UNRECORDED.format(job=facts.job_id)]) if is_lost else why
    if facts.is_unrecorded and facts.answer is not None:
        return "unknown", f"its launcher ended while sbatch ran, and Slurm does not answer here: {facts.answer.text}"
    if facts.mode == "allocation" and facts.answer and facts.answer.kind in ("over", "forgotten"):
        return _job_is_gone(facts, facts.answer)
    return _by_process(facts)


def _by_job(facts: Facts, answer: Answer) -> tuple[str, str]:
    if answer.kind == "silent":
        silent = "its supervisor is silent, and " if facts.phase and facts.phase != "requeued" else ""
        return "unknown", f"{silent}Slurm does not answer here: {answer.text}"
    if answer.kind != "queued" or answer.job is None:
        return _job_is_gone(facts, answer)
    job, phase = answer.job, answer.job.phase
    if phase is JobPhase.PENDING:
        return ("requeued" if facts.phase else "pending"), ""
    if phase is not JobPhase.RUNNING:
        return "unknown", f"Slurm says that job {facts.job_id} is {job.state}"
    if facts.phase in ("", "requeued"):
        return "starting", f"job {facts.job_id} has started, its supervisor has not reported yet"
    how = "" if job.state == "RUNNING" else f" ({job.state})"
    return facts.phase, f"{_stood_still(facts)}, but Slurm still has its job{how}"


def _job_is_gone(facts: Facts, answer: Answer) -> tuple[str, str]:
    if facts.cancelled_by and facts.phase in ("", "requeued"):
        again = " again" if facts.phase else ""
        return "failed", f"it was cancelled by {facts.cancelled_by} before it started{again}"
    if answer.kind == "over":
        return "vanished", f"job {facts.job_id} is over ({answer.text}), and its supervisor left no last word"
    known = (
        f"accounting says: {answer.text}" if answer.text else "how it ended is unknown, there is no accounting to ask"
    )
    return (
        "vanished",
        f"Slurm does not know job {facts.job_id} any more, and its supervisor left no last word; {known}",
    )


def _by_process(facts: Facts) -> tuple[str, str]:
    """A local run, one inside the allocation of somebody's shell, or one that no launcher has submitted yet."""
    whose = "supervisor" if facts.phase else "launcher"
    if facts.process == "here":
        return (facts.phase or "starting"), (_stood_still(facts) + ", but its process lives" if facts.phase else "")
    if facts.process == "elsewhere":
        return "unknown", f"its {whose} ran on {facts.host} and is silent; only there can be seen whether it lives"
    if facts.process == "gone" and facts.phase:
        return "vanished", "its supervisor is gone and left no last word (such a run ends with its launcher)"
    if facts.process == "gone":
        return "vanished", "its launcher ended before anything was started"
    return "unknown", "nothing says who started it, or where"


def _stood_still(facts: Facts) -> str:
    return f"its supervisor is silent: the heartbeat stood still for {facts.beats.watched_s:.1f} s"


# ---- looking ---------------------------------------------------------------------------------------------------------


def watch(
    folders: Sequence[Folder], *, look_s: float, also_over: bool = False, sleep: Callable[[float], None] = time.sleep
) -> dict[tuple[Path, int], Beats]:
    """(run, attempt) -> what moved, for runs that may be alive. Ends as soon as everything has moved.

    `also_over`: and for those that are over, when an instance has not said its last word: people start servers of such runs.
    """
    watched = [
        folder
        for folder in folders
        if folder.state
        and (folder.state.get("phase") not in (*ENDED, "requeued") or (also_over and any(_counters(folder))))
    ]
    if not watched:
        return {}
    first = [_counters(folder) for folder in watched]
    moved: list[set[str]] = [set() for _ in watched]
    started_s = time.monotonic()
    while time.monotonic() - started_s < look_s and any(
        len(there) < len(all_of) for there, all_of in zip(moved, first, strict=True)
    ):
        sleep(LOOK_PAUSE_S)
        for folder, before, done in zip(watched, first, moved, strict=True):
            now = _counters(folder) if len(done) < len(before) else {}
            done.update(name for name in before if name in now and now[name] != before[name])
    took_s = time.monotonic() - started_s
    return {
        (folder.root, folder.run.attempt): Beats(
            "" in done, {name: name in done for name in before if name}, round(took_s, 1)
        )
        for folder, before, done in zip(watched, first, moved, strict=True)
    }


class Stillness:
    """How long the supervisor's counter has stood still, on this process's clock; from the first look on when it never moves."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat: tuple[int, Any] | None = None
        self._moved_s = clock()

    def so_far_s(self, attempt: int, state: Mapping[str, Any]) -> float:
        beat, now_s = (attempt, state.get("heartbeat")), self._clock()
        if beat != self._beat:
            self._beat, self._moved_s = beat, now_s
        return now_s - self._moved_s


def _counters(folder: Folder) -> dict[str, int]:
    """Heartbeats by instance; the supervisor's under "". The folders are listed first, so that NFS looks again."""
    run = folder.run
    names_if_any(run.attempt_dir)
    found = {"": int((folder.record(run.state_json) or {}).get("heartbeat", -1))}
    for name in names_if_any(run.instances):
        record = folder.record(run.instances / name)
        if record is not None and record.get("state") != "stopping":
            found[name.removesuffix(".json")] = int(record.get("heartbeat", -1))
    return found


def ask(job_ids: set[str]) -> dict[str, Answer]:
    """One squeue for all; only a job that it does not show as alive is asked about once more."""
    try:
        shown = waiting.queued(job_ids)
    except slurm.SlurmCommandError as error:
        return {job_id: Answer("silent", str(error)) for job_id in job_ids}
    return {job_id: _ask_again(job_id, shown.get(int(job_id))) for job_id in job_ids}


def _ask_again(job_id: str, job: QueuedJob | None) -> Answer:
    if job is not None and not job.phase.is_over:
        return Answer("queued", job=job)
    try:
        components = slurm.query(int(job_id))
    except slurm.SlurmCommandError as error:
        return Answer("silent", str(error))
    if components and slurm.fold(components).phase.is_over:
        return Answer("over", slurm.fold(components).text)
    if components:
        return Answer("silent", f"it shows job {job_id} and does not show it")
    return Answer("forgotten", waiting.verdict(job_id))


def process_of(folder: Folder) -> tuple[str, str]:
    """("here" | "gone" | "elsewhere" | "", host): the supervisor that has reported, else the launcher of the attempt.

    A pid alone says nothing, it may be another's by now: a supervisor is known by the folder of its attempt on its command line,
    a launcher by the time at which it started.
    """
    state = folder.state
    if state:
        return _place(state, lambda: _has_word(int(state.get("pid", 0)), str(folder.run.submitit)))
    mark = folder.start.get("launcher") or (folder.identity.get("launcher") if folder.run.attempt == 0 else None) or {}
    return _place(mark, lambda: bool(mark.get("started")) and process_start(int(mark["pid"])) == mark["started"])


def _place(mark: Mapping[str, Any], lives: Callable[[], bool]) -> tuple[str, str]:
    host = str(mark.get("host", ""))
    if not host:
        return "", ""
    if host != socket.gethostname():
        return "elsewhere", host
    return ("here" if lives() else "gone"), host


def _has_word(pid: int, word: str) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return word.encode() in command.split(b"\0")
