"""End a run.

    python -m launch.cancel RUN                  now: the stages are stopped in order, no checkpoint is made
    python -m launch.cancel RUN --checkpoint     after the step that is being trained, with a checkpoint to resume from

A job that still waits is taken out of the queue. A running one is asked through attempts/N/cancel.json, wherever it runs, and its
last word is awaited. Exit code 0 when the run is over (or was before), 1 when it did not end in time, 2 when there is no run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launch import figures, slurm
from launch.cancel_request import CancelRequest, me, write_cancel_request
from launch.errors import LibraError
from launch.metrics import from_here
from launch.people import command
from launch.runs import Folder
from launch.slurm import JobPhase
from launch.truth import ENDED, Truth, process_of, tell_one
from launch.waiting import Pace
from stages.rundir import FencedError, RunDir, RunDirectoryError
from stages.stopping import StopRequestError, read_stop_request

OBEY_S = 5.0
"""A supervisor looks for the request several times a second; one that has not reacted in this time gets a TERM."""
END_S = 120.0
"""From the request, or behind the grace of a checkpoint, to the last word: longer than a supervisor may take to stop its steps."""
QUEUE_S = 60.0
POLL_S = 0.2

Say = Callable[[str], None]


class CancelError(LibraError):
    """The run did not end, or nobody can say whether it runs."""


def cancel(root: Path, *, checkpoint: bool, say: Say, sleep: Callable[[float], None] = time.sleep) -> str:
    """Returns how the run ended, in words. Raises CancelError, NotARunError."""
    truth = tell_one(root)
    shown = from_here(truth.folder.root)
    if truth.state == "unknown":
        raise CancelError(f"nobody can say whether {shown} runs: {truth.why}")
    if not truth.is_alive:
        return f"{shown} is over already: {_how(truth)}"
    run = ask_to_end(truth.run, checkpoint=checkpoint)
    if truth.job is not None and truth.folder.mode == "slurm" and _has_no_supervisor(truth):
        return _end_job(truth, checkpoint, say, sleep)
    return _Ending(run, truth, checkpoint, say, sleep).wait()


def _has_no_supervisor(truth: Truth) -> bool:
    """Nobody is there who would look at a request: the job waits, or its script has not come to the supervisor yet (set-up lines
    may take as long as they like)."""
    return truth.state in ("pending", "requeued") or truth.folder.state.get("phase", "") in ("", "requeued")


def ask_to_end(run: RunDir, *, checkpoint: bool) -> RunDir:
    """Leave the request for the newest attempt, also when one starts at this very moment; returns the run seen at it.

    Raises CancelError.
    """
    request = CancelRequest(checkpoint, me())
    for _ in range(3):
        try:
            run = RunDir.open(run.root, writer="cancel")
            write_cancel_request(run, request)
        except FencedError:
            continue
        except RunDirectoryError as error:
            raise CancelError(f"no request can be left for {from_here(run.root)}: {error}") from error
        return run
    raise CancelError(f"{run.root} starts one attempt after another; try again")


def _end_job(truth: Truth, checkpoint: bool, say: Say, sleep: Callable[[float], None]) -> str:
    """A supervisor that comes up meanwhile gets Slurm's TERM and stops in order."""
    job_id, shown = truth.folder.job_id, from_here(truth.folder.root)
    is_waiting = truth.job is not None and truth.job.phase is JobPhase.PENDING
    if checkpoint:
        how = "is waiting" if is_waiting else "has just started"
        say(f"job {job_id} {how}, there is nothing to save beyond the checkpoints that it has")
    try:
        slurm.cancel_job(int(job_id))
    except slurm.SlurmCommandError as error:
        raise CancelError(f"job {job_id} was not cancelled: {error}") from error
    end_s, pace = time.monotonic() + QUEUE_S, Pace(1.0, 5.0)
    while time.monotonic() < end_s:
        if pace.due() and not (now := tell_one(truth.folder.root)).is_alive:
            how = "taken out of the queue" if is_waiting else "ended before its supervisor reported"
            return f"{shown} has ended: job {job_id} was {how}" + (
                f" ({_how(now)})" if now.state in ENDED and now.folder.state else ""
            )
        sleep(POLL_S)
    raise CancelError(f"Slurm still shows job {job_id} {QUEUE_S:g} s after scancel")


class _Ending:
    """Waits for the last word of a running attempt; a supervisor that does not look at the request is asked by a signal."""

    def __init__(self, run: RunDir, truth: Truth, checkpoint: bool, say: Say, sleep: Callable[[float], None]) -> None:
        self._run, self._truth, self._checkpoint = run, truth, checkpoint
        self._say, self._sleep = say, sleep
        self._end_s = time.monotonic() + END_S
        self._seen_s: float | None = None
        self._obeys = self._signalled = False
        self._pace = Pace(10.0, 30.0)

    def wait(self) -> str:
        self._pace.due()
        shown = from_here(self._run.root)
        while time.monotonic() < self._end_s:
            state = self._run.read(self._run.state_json) or {}
            if state.get("phase") in ENDED:
                return f"{shown} has ended: {self._last_word()}"
            if state.get("phase") == "requeued":  # the attempt did not see the request any more; the next one is asked
                return cancel(self._run.root, checkpoint=self._checkpoint, say=self._say, sleep=self._sleep)
            self._look(state)
            if self._pace.due() and not (now := tell_one(self._run.root)).is_alive:
                return f"{shown} has ended: {_how(now)}"
            self._sleep(POLL_S)
        raise CancelError(f"{shown} has not ended {END_S:g} s after it was asked to; {self._by_force(state)}")

    def _look(self, state: dict[str, object]) -> None:
        now_s = time.monotonic()
        stop = self._stop_grace_s()
        if stop is not None and not self._obeys and self._checkpoint:
            self._obeys, self._end_s = True, now_s + stop + END_S
            self._say(f"a checkpoint is being made, which may take {stop:.0f} s")
        self._obeys = self._obeys or state.get("phase") == "stopping" or bool(state.get("stop"))
        if self._seen_s is None and state:
            self._seen_s = now_s
        late = self._seen_s is not None and now_s - self._seen_s > OBEY_S
        if late and not self._obeys and not self._signalled:
            self._signalled = True
            self._signal()

    def _stop_grace_s(self) -> float | None:
        try:
            found = read_stop_request(self._run)
        except StopRequestError:
            return None
        return None if found is None else found.grace_s

    def _signal(self) -> None:
        shown = from_here(self._run.root)
        if self._checkpoint:
            raise CancelError(
                f"the supervisor of {shown} does not react to the request; to end it without a checkpoint:"
                f" python -m launch.cancel {shown}"
            )
        self._say("the supervisor does not react to the request; it gets a TERM")
        if self._truth.folder.mode == "slurm":
            try:
                slurm.signal_batch(int(self._truth.folder.job_id), "TERM")
            except slurm.SlurmCommandError as error:
                raise CancelError(
                    f"the TERM did not reach the supervisor of {shown}: {error}; {self._by_force({})}"
                ) from error
        elif not terminate(self._run):
            raise CancelError(f"the supervisor of {shown} is not a process of this host; use launch.cancel there")

    def _by_force(self, state: dict[str, object]) -> str:
        if self._truth.folder.mode == "slurm":
            return f"by force: scancel {self._truth.folder.job_id}"
        return f"by force: kill process {state.get('pid')} on {state.get('host')}"

    def _last_word(self) -> str:
        return _how(tell_one(self._run.root))


def terminate(run: RunDir) -> bool:
    """TERM to the supervisor of a local run. False when it is no process of this host; never to another's process: what it is is
    looked at after a handle on it was taken."""
    folder = Folder(run)
    try:
        handle = os.pidfd_open(int(folder.state.get("pid", 0)))
    except OSError:
        return False
    try:
        if process_of(folder)[0] != "here":
            return False
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _how(truth: Truth) -> str:
    """The last word in words, with the checkpoint that is left."""
    cause = truth.folder.state.get("cause") or {}
    words = f"{cause['step']}: {cause['message']}" if cause.get("message") else truth.why
    if (
        truth.state == "succeeded" or "newest checkpoint" in words or "no checkpoint" in words
    ):  # the supervisor has said it already
        return f"{truth.state}{f', {words}' if words else ''}"
    saved = figures.saved(truth.folder, 0)
    left = "it has no checkpoint" if saved.step is None else f"its newest checkpoint is that of step {saved.step}"
    return f"{truth.state}{f', {words}' if words else ''}; {left}"


def main(words: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(words)
    print(cancel(asked.run, checkpoint=asked.checkpoint, say=lambda text: print(text, flush=True)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.cancel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--checkpoint", action="store_true", help="make a checkpoint first")
    return parser


if __name__ == "__main__":
    sys.exit(command(main))
