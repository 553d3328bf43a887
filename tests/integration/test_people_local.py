"""People's commands on local runs with fake stages: another terminal sees, ends and resumes what this one started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launch import pipeline, resume
from launch.executors import submit
from launch.submission import Submission
from stages.files import make_directory
from tests.fake_runs import WORKING, await_ready, go, processes_of, state, until
from tests.fake_stages import STEPS_PER_ATTEMPT, entry
from tests.made_runs import take_away
from tests.people_kit import people, told

TASKS = ("trainer.0", "controller.0", "rollout_000.0")
LIMIT_S = 20.0


class Local:
    """A run that this process has started, as `python -m launch +experiment=demo launch.mode=local` would."""

    def __init__(self, root: Path, behaviours: dict[str, dict[str, Any]]) -> None:
        prepared = pipeline.prepare(["+experiment=demo", "launch.mode=local", f"launch.run_dir={root}"])
        self.run = pipeline.create_run(prepared)
        make_directory(root / "ready")
        (root / "fake.json").write_text(json.dumps({**WORKING, **behaviours}))
        self.submission: Submission = submit(prepared.config, prepared.plan, self.run, entry=entry)
        self.run.write(self.run.submission_json, {"mode": "local", "job_id": self.submission.job_id})
        await_ready(self.run, TASKS)


Start = Callable[..., Local]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Local] = []

    def starter(behaviours: dict[str, dict[str, Any]] | None = None) -> Local:
        made.append(Local(tmp_path / "run", behaviours or {"trainer": {"do": "work"}}))
        return made[-1]

    yield starter
    for local in made:
        local.submission.cancel()
        over(local.submission)


def over(submission: Submission) -> tuple[str, str]:
    until(lambda: submission.poll()[0] in ("succeeded", "failed"), LIMIT_S, "the end of the run")
    until(lambda: not processes_of(submission.run), LIMIT_S, "the end of all processes")
    return submission.poll()


def test_another_terminal_sees_a_local_run_and_its_end(start: Start) -> None:
    local = start()

    assert told(local.run) == ("running", 0)
    go(local.run)
    assert over(local.submission) == ("succeeded", "")
    assert told(local.run) == ("succeeded", 0)


def test_another_terminal_ends_a_local_run(start: Start) -> None:
    local = start()

    done = people("cancel", local.run)

    assert done.returncode == 0, done.stderr
    assert "failed, supervisor: the run was cancelled by" in done.stdout
    assert over(local.submission)[0] == "failed"
    assert local.submission.exit_code == 143


def test_a_local_run_is_ended_with_a_checkpoint_and_goes_on_from_it(start: Start) -> None:
    local = start({"trainer": {"do": "train"}})

    done = people("cancel", local.run, "--checkpoint")
    assert f"its newest checkpoint is step_{STEPS_PER_ATTEMPT:06d}" in done.stdout, done.stdout + done.stderr
    over(local.submission)
    take_away(local.run, "ready")
    make_directory(local.run.root / "ready")

    later, submission = resume.start(resume.prepare(local.run.root, ["launch.stop_grace_s=1"]), entry=entry)
    await_ready(later, TASKS)
    assert (later.root / "ready" / "from.1").read_text() == str(STEPS_PER_ATTEMPT)
    go(later)

    assert over(submission) == ("succeeded", "")
    assert told(later) == ("succeeded", 0)


def test_a_killed_supervisor_of_a_local_run_has_vanished(start: Start) -> None:
    local = start()

    os.kill(int(state(local.run)["pid"]), signal.SIGKILL)
    over(local.submission)

    assert told(local.run) == ("vanished", 1)
    assert "left no last word" in people("status", local.run).stdout


def test_a_stopped_supervisor_is_silent_and_gets_a_term(start: Start) -> None:
    """SIGSTOP: it does not look at the request, and finds TERM and request when it goes on."""
    local = start()
    supervisor = int(state(local.run)["pid"])
    os.kill(supervisor, signal.SIGSTOP)
    try:
        assert told(local.run) == ("running", 0)
        assert "its process lives" in people("status", local.run).stdout
        command_line = [sys.executable, "-u", "-m", "launch.cancel", str(local.run.root)]
        with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as cancel:
            assert cancel.stdout is not None
            assert "it gets a TERM" in cancel.stdout.readline()
            os.kill(supervisor, signal.SIGCONT)
            assert "has ended: failed" in cancel.stdout.readline()
    finally:
        with suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGCONT)
    over(local.submission)
