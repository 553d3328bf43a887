"""Stay with a run until it ends: queue, progress, restarts and further attempts, the end with its cause and exit code.

    python -m launch.follow RUN

shows what `python -m launch` shows after it has submitted. Ctrl-C leaves the run alone; a second Ctrl-C within 2 s ends it, with a
checkpoint first. Exit code: 0 when the run succeeds, else the one of its first fatal cause; 130 after Ctrl-C; 2 when there is no run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.display import Display, choose_display, show
from launch.errors import RunFailedError
from launch.life import DistantLife, Life, Sign, SlurmLife
from launch.metrics import JsonLines, from_here, summary_text
from launch.people import command
from launch.truth import ENDED, Truth, tell_one
from stages.files import list_names, read_json
from stages.rundir import RunDir

LOOK_INTERVAL_S = 0.25
LAST_WORDS_S = 5.0
"""How long the supervisor's final state may take to appear after its job has left the queue."""
CANCELLED_CODE = 143
GONE = "the run directory is gone: it was deleted or moved away"


def follow(
    run: RunDir,
    life: Life,
    display: Display,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns when the run has succeeded, in whichever attempt; raises RunFailedError with the first fatal cause otherwise."""
    metrics = JsonLines(run.metrics_jsonl)
    notes = Notes(display)
    gone_s: float | None = None
    while True:
        state = run.read(run.state_json) or {}
        notes.attempt(run, state)
        notes.stages(run, state)
        for record in metrics.new():
            show(display, record)
        newest = run.newest_attempt()
        if newest > run.attempt:
            run = RunDir(run.root, run.run_id, newest, run.writer)
            notes.next_attempt()
            continue
        if state.get("phase") in ENDED:
            return finish(run, state)
        sign = life.look(run, state) if state or list_names(run.root) else Sign("over", GONE)
        notes.life(sign)
        now_s = clock()
        gone_s = None if sign.kind != "over" else now_s if gone_s is None else gone_s
        if gone_s is not None and now_s - gone_s > LAST_WORDS_S:
            raise vanished(run, sign)
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
    return "\n".join([*lines, more_about(run)])


def more_about(run: RunDir) -> str:
    shown = from_here(run.root)
    return f"all logs: {run.logs}\nmore: python -m launch.status {shown}, python -m launch.logs {shown}"


def vanished(run: RunDir, sign: Sign) -> RunFailedError:
    """The job is over and its supervisor left no last word: it was killed, or its node died, or it never started."""
    from launch.steps import tail, without_plumbing

    if sign.words == GONE:
        return RunFailedError(
            f"{GONE}: {run.root}\nIts job cannot work without it. To see whether Slurm still has one: squeue --me;"
            " to end that: scancel JOB",
            1,
        )
    truth = tell_one(run.root)
    if truth.state == "failed":
        return RunFailedError(f"the run failed: {truth.why}", CANCELLED_CODE)
    words = [f"the run failed: supervisor: {truth.why or sign.words or 'it ended without a last word'}"]
    if sign.words and sign.words not in words[0]:
        words[0] += f" ({sign.words})"
    lines = without_plumbing(tail(run.logs / "supervisor.log", lines=15))
    if lines:
        words += ["last lines of the supervisor's log:", *(f"  | {line}" for line in lines)]
    return RunFailedError("\n".join([*words, more_about(run)]), 1)


def final_words(run: RunDir) -> str:
    summary = read_json(run.summary_json)
    return summary_text(summary, run.root) if summary else f"the run succeeded; no summary was written in {run.root}"


class Notes:
    """Says each change of the queue, of the stages and of the attempts once."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._said: set[str] = set()
        self._steps: dict[str, tuple[Any, Any]] = {}
        self._starts: dict[str, int] = {}
        self._is_new = False

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._display.note(text)

    def life(self, sign: Sign) -> None:
        """What waits is shown where it changes in place, and said where lines stay only when it is news."""
        if sign.kind == "waiting":
            self._display.waiting(sign.words, is_news=sign.is_news)
            return
        self._display.waiting("", is_news=False)
        if sign.is_news and sign.words:
            self._display.note(sign.words)

    def next_attempt(self) -> None:
        self._said, self._steps, self._starts = set(), {}, {}
        self._is_new = True

    def attempt(self, run: RunDir, state: dict[str, Any]) -> None:
        """A further attempt, once it is written down why there is one; its folder is there a moment before."""
        record = run.read(run.attempt_json) or {}
        if not self._is_new or not (record or state):
            return
        self._is_new = False
        why = f" ({record['reason']})" if record.get("reason") else ""
        where = f", from step {record['resumed_step']}" if record.get("resumed_step") else ""
        self._display.note(f"attempt {run.attempt}{why}{where}")

    def stages(self, run: RunDir, state: dict[str, Any]) -> None:
        reason = str((state.get("stop") or {}).get("reason") or "")
        if state.get("phase") == "requeued":
            self._once(f"attempt {run.attempt} is over, the run goes on in another{f': {reason}' if reason else ''}")
        elif state.get("phase") == "stopping" or reason:
            self._once(f"the run is stopping{f', with a checkpoint first: {reason}' if reason else ''}")
        for name, step in sorted((state.get("steps") or {}).items()):
            self._step(name, step)
        for file_name in list_names(run.instances):
            record = run.read(run.instances / file_name)
            if record and record.get("state") in ("starting", "ready"):
                detail = "vLLM is starting" if record["state"] == "starting" else f"vLLM serves on {record['base_url']}"
                again = self._starts.get(record["instance"], 1)
                self._once(f"{record['instance']}: {detail}{f' (start {again})' if again > 1 else ''}")

    def _step(self, name: str, step: dict[str, Any]) -> None:
        """Each start of a step is told apart by its time: a restarted one is `running` again."""
        seen, now = self._steps.get(name), (step.get("state"), step.get("started"))
        if seen == now:
            return
        self._steps[name] = now
        if now[0] == "running" and (seen is None or seen[1] != now[1]):
            self._starts[name] = self._starts.get(name, 0) + 1
        more = [f"start {again}"] if (again := self._starts.get(name, 1)) > 1 and now[0] == "running" else []
        more += [str(step["reason"])] if step.get("reason") and now[0] in ("waiting", "lost") else []
        self._display.note(f"{name}: {now[0]}{f' ({more[0]})' if more else ''}")


# ---- python -m launch.follow -----------------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> int:
    from launch.detach import interrupted

    asked = _parser().parse_args(words)
    truth = tell_one(asked.run)
    run = truth.run
    if not truth.is_alive:
        return _over(truth)
    life: Life = SlurmLife() if truth.folder.mode == "slurm" else DistantLife()
    try:
        with choose_display(run.root.name) as display:
            follow(run, life, display)
    except KeyboardInterrupt:
        interrupted(run, truth.folder.mode)
    print(final_words(run), flush=True)
    return 0


def _over(truth: Truth) -> int:
    """Nothing to stay with: the end as it would have been said."""
    run, state = truth.run, truth.folder.state
    if state.get("phase") == "failed":
        finish(run, state)
    if truth.state == "succeeded":
        print(final_words(run), flush=True)
        return 0
    was = f" ({', '.join(truth.damage)})" if truth.damage else ""
    raise RunFailedError(
        f"{from_here(run.root)} is {truth.state}{f': {truth.why}' if truth.why else ''}{was}\n{more_about(run)}", 1
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.follow", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    return parser


if __name__ == "__main__":
    sys.exit(command(main))
