"""What Slurm says about a job, in its text formats, and the few things we tell it.

JSON output changed in every release since 22.05; these text forms did not. sacct is never asked: accounting may be off.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launch.hostlist import expand_nodes
from launch.job_states import JOB_STATES, JobPhase, job_phase
from launch.scrub import scrubbed

__all__ = ["JOB_STATES", "JobPhase", "expand_nodes", "job_phase"]
"""What callers know as Slurm's, although it has files of its own."""

COMMAND_TIMEOUT_S = 10.0


class SlurmCommandError(RuntimeError):
    """A Slurm command failed or did not answer; the message holds what it printed."""


def signal_name(number: int) -> str:
    """ "SIGKILL" for 9; a number that has no name is said as such."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_IN_EXIT_CODE = ("None", "NonZeroExitCode", "RaisedSignal")
"""Reasons that say nothing beside the exit code. RaisedSignal:9 came with 24.05; 22.05 says JobLaunchFailure in its place."""
_WITHOUT_EXIT_CODE = ("NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
"""Slurm gives these an exit code of its own making (0:1, 0:125), which names no signal."""

_NO_LOG = "53"
"""In the place of a signal: the batch script was never started (22.05: seen for a folder that was missing)."""


@dataclass(frozen=True)
class ComponentState:
    """One component of a job. `exit_code` is Slurm's "status:signal", empty when the source does not tell it."""

    job_id: int
    offset: int
    state: str
    reason: str = ""
    nodes: str = ""
    exit_code: str = ""

    @property
    def phase(self) -> JobPhase:
        return job_phase(self.state)

    @property
    def text(self) -> str:
        """For messages: state, exit code, reason."""
        parts = [f"component {self.offset} is {self.state}", self._exit, self.reason]
        if self.reason.startswith(_IN_EXIT_CODE):
            del parts[2]
        return ", ".join(part for part in parts if part)

    @property
    def _exit(self) -> str:
        status, _, signum = self.exit_code.partition(":")
        if self.exit_code in ("", "0:0") or self.state in _WITHOUT_EXIT_CODE:
            return ""
        if signum == _NO_LOG:
            return "Slurm could not write the job's log on its node: the folder is missing there, or closed to the user"
        return f"killed by {signal_name(int(signum))}" if signum not in ("", "0") else f"exit code {status}"


def fold(components: Sequence[ComponentState]) -> ComponentState:
    """One state for a whole hetjob. The batch script belongs to the leader, so nothing is over while the leader is not.

    Then the first failed component speaks for all: after a time limit the leader is TIMEOUT and component 1, killed by it,
    COMPLETED. Raises ValueError when there is no component.
    """
    if not components:
        raise ValueError("no component to fold")
    ordered = sorted(components, key=lambda component: component.offset)
    leader = ordered[0]
    if not leader.phase.is_over:
        return leader
    return next((component for component in ordered if component.phase is JobPhase.FAILED), leader)


SQUEUE_FORMAT = "%i|%T|%r|%N"


def parse_squeue(text: str) -> list[ComponentState]:
    """Lines of `squeue -h -o '%i|%T|%r|%N'`: "12+1|RUNNING|None|node[0-1]", or "12|..." for an ordinary job."""
    found = []
    for line in text.splitlines():
        match = re.match(r"^\s*(\d+)(?:\+(\d+))?\|([^|]*)\|([^|]*)\|(.*)$", line)
        if match:
            job, offset = int(match[1]), int(match[2] or 0)
            found.append(ComponentState(job + offset, offset, match[3].strip(), match[4].strip(), match[5].strip()))
    return found


def parse_scontrol(text: str) -> list[ComponentState]:
    """Lines of `scontrol -o show job J`: one record for each component."""
    return [
        ComponentState(
            job_id=int(values["JobId"]),
            offset=int(values.get("HetJobOffset", 0)),
            state=values.get("JobState", ""),
            reason=values.get("Reason", ""),
            nodes="" if values.get("NodeList") == "(null)" else values.get("NodeList", ""),
            exit_code=values.get("ExitCode", ""),
        )
        for values in records(text, "JobId")
    ]


def records(text: str, first: str) -> list[dict[str, str]]:
    """Lines of NAME=value words, as `scontrol -o show` prints them; those without the word `first` are left out.

    Values may hold blanks (Comment=, Command=, SubmitLine=) and are cut short there, even words like these: the real ones
    come first, and count. Before them stands only the job's name, which is left out, for it may be anything.
    """
    found = []
    for line in text.splitlines():
        unnamed = re.sub(r"\sJobName=.*?\s(?=(?:HetJobIdSet|UserId)=)", " ", line, count=1)
        words = dict(reversed(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", unnamed)))
        if first in words:
            found.append(words)
    return found


def parse_steps(text: str) -> dict[str, str]:
    """Lines of `squeue -s -h -o '%i|%j'` as step name -> step id."""
    pairs = (line.strip().partition("|") for line in text.splitlines())
    return {name: step for step, _, name in pairs if name and re.match(r"^\d+\.\d+$", step)}


_UNKNOWN_JOB = re.compile(r"Invalid job id", re.IGNORECASE)


def query(job_id: int) -> list[ComponentState]:
    """Every component of the job whose leader is `job_id`; empty when Slurm does not know it (any more).

    Finished jobs stay known for MinJobAge (300 s by default). Raises SlurmCommandError when Slurm does not answer.
    """
    try:
        found = parse_squeue(command(["squeue", "-h", "-t", "all", "-j", str(job_id), "-o", SQUEUE_FORMAT]))
        if found and not fold(found).phase.is_over:
            return found
        # Only scontrol knows exit codes, and it still has jobs that some squeue releases no longer list.
        return parse_scontrol(command(["scontrol", "-o", "show", "job", str(job_id)])) or found
    except SlurmCommandError as error:
        if _UNKNOWN_JOB.search(str(error)):
            return []
        raise


def step_ids(job_ids: Iterable[int]) -> dict[str, str]:
    """Step name -> step id over all components; `squeue -s -j LEADER` alone lists component 0 only (22.05)."""
    listed = ",".join(str(job_id) for job_id in job_ids)
    return parse_steps(command(["squeue", "-s", "-h", "-j", listed, "-o", "%i|%j"]))


def cancel_steps(ids: Sequence[str], name: str = "") -> None:
    """Signal steps; without a signal, kill them at once. scancel's exit code is not looked at: on 22.05 it is 225
    ("Invalid job id") for a step of a hetjob's component 0 although the signal arrives."""
    if ids:
        _run(["scancel", *([f"--signal={name}"] if name else []), *ids])


def cancel_job(job_id: int) -> None:
    """End all components, by the leader's id only. Raises SlurmCommandError."""
    command(["scancel", str(job_id)])


def signal_batch(job_id: int, name: str) -> None:
    """Signal the batch shell, which is the supervisor, and nothing else. Raises SlurmCommandError."""
    command(["scancel", "--batch", f"--signal={name}", str(job_id)])


def command(arguments: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """stdout of a Slurm command, run in a scrubbed environment. Raises SlurmCommandError."""
    done = _run(arguments, timeout_s)
    if done.returncode != 0:
        raise SlurmCommandError(f"{arguments[0]} failed ({done.returncode}): {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _run(arguments: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(arguments),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=scrubbed(os.environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmCommandError(f"{arguments[0]} did not answer within {timeout_s:g} s") from error
    except FileNotFoundError as error:
        raise SlurmCommandError(f"{arguments[0]} is not on PATH") from error
