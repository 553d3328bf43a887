"""The request to end with a checkpoint: who sees it, how often it is looked for, and what is not one."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.context import StageContext
from stages.rundir import RunDir
from stages.stopping import StopRequest, StopRequestedError, StopRequestError, read_stop_request, write_stop_request
from tests.weights_kit import as_writer, make_context

REQUEST = StopRequest("checkpoint", "the time limit is near", 30.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def context(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    monkeypatch.setattr("stages.context.STOP_LOOK_S", 0.0)
    return make_context(run)


def test_what_the_supervisor_writes_is_what_stages_see(run: RunDir, context: StageContext) -> None:
    assert context.stop_request() is None
    context.check_stop_request()

    write_stop_request(as_writer(run, "supervisor"), REQUEST)

    assert context.stop_request() == REQUEST
    with pytest.raises(StopRequestedError, match="asked to end with a checkpoint: the time limit is near"):
        context.check_stop_request()


def test_a_request_to_an_older_attempt_is_none(run: RunDir) -> None:
    write_stop_request(run, REQUEST)
    run.start_attempt(1)

    assert read_stop_request(RunDir.open(run.root, writer="trainer")) is None


def test_the_file_is_not_looked_for_at_every_call(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("stages.context.time.monotonic", lambda: now_s[0])
    context = make_context(run)
    assert context.stop_request() is None

    write_stop_request(run, REQUEST)

    assert context.stop_request() is None
    now_s[0] += 0.3
    assert context.stop_request() == REQUEST


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "nap", "reason": "", "grace_s": 1.0},
        {"kind": "checkpoint"},
        {"kind": "checkpoint", "reason": "", "grace_s": "x"},
    ],
)
def test_a_request_that_nobody_understands_is_an_error(run: RunDir, record: dict[str, object]) -> None:
    run.write(run.stop_json, record)

    with pytest.raises(StopRequestError, match=r"stop\.json"):
        read_stop_request(run)
