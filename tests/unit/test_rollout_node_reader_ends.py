"""How a reading of the agent ends: given up, too late, never."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from stages.rollout import memory_folder, node_reader
from stages.rollout.memory_folder import leave_memory_folder
from stages.rundir import RunDir
from stages.weights.manifest import Manifest
from tests.engine_kit import publish_version, run, stage
from tests.node_reader_kit import (
    LIMIT_S,
    GivenUpError,
    Held,
    agent,
    an_engine,
    give_up_a_reading,
    held,
    reading,
    start,
    sums,
)

__all__ = ["held", "run", "start", "sums"]


def test_a_reading_that_nobody_wants_any_more_is_given_up_and_frees_the_memory(
    run: RunDir, start: Path, sums: None, held: Held
) -> None:
    manifest, reader = publish_version(run, 1), agent(run, start)
    _, weights = an_engine(run, start)

    give_up_a_reading(reader, manifest, held)
    held.may_go_on.set()

    assert stage(weights, run, manifest).read_here


def test_while_a_reading_that_was_given_up_is_still_in_a_slow_read_the_next_one_is_left_to_the_engine(
    run: RunDir, start: Path, sums: None, held: Held
) -> None:
    manifest, reader = publish_version(run, 1), agent(run, start)
    _, weights = an_engine(run, start)
    give_up_a_reading(reader, manifest, held)

    with reading(reader, manifest):
        held.may_go_on.set()
        assert stage(weights, run, manifest).read_here


def test_a_stop_is_noticed_before_the_reading_has_begun(
    run: RunDir, start: Path, sums: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, reader, may_go_on = publish_version(run, 1), agent(run, start), threading.Event()

    def slow(*_: Any) -> Manifest:
        assert may_go_on.wait(LIMIT_S)
        return manifest

    def pause(_: float) -> None:
        raise GivenUpError

    monkeypatch.setattr(node_reader, "load_manifest", slow)

    with pytest.raises(GivenUpError), reading(reader, manifest, pause):
        pass
    may_go_on.set()
    reader.close()


@pytest.mark.parametrize("what", ["load_manifest", "model_signature"])
def test_a_reading_that_hangs_before_it_has_begun_keeps_the_engine_from_nothing(
    run: RunDir, start: Path, sums: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    manifest, reader, may_go_on = publish_version(run, 1), agent(run, start), threading.Event()
    _, weights = an_engine(run, start)
    ended: list[bool] = []

    def hang(*_: Any) -> None:
        ended.append(may_go_on.wait(LIMIT_S))
        raise OSError("late")

    monkeypatch.setattr(node_reader, "_BEGIN_S", 0.05)
    monkeypatch.setattr(node_reader, what, hang)

    with reading(reader, manifest):
        assert stage(weights, run, manifest).read_here
        assert not ended

    may_go_on.set()
    reader.close()


@pytest.mark.parametrize("what", ["load_manifest", "model_signature"])
def test_a_reading_that_wakes_when_it_is_over_leaves_the_memory_as_it_is(
    run: RunDir, start: Path, sums: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    first, second, reader = publish_version(run, 1), publish_version(run, 2), agent(run, start)
    _, weights = an_engine(run, start)
    honest, may_go_on = vars(node_reader)[what], threading.Event()

    def slow(*arguments: Any) -> Any:
        assert may_go_on.wait(LIMIT_S)
        return honest(*arguments)

    monkeypatch.setattr(node_reader, "_BEGIN_S", 0.0)
    monkeypatch.setattr(node_reader, what, slow)
    with reading(reader, first):
        pass
    stage(weights, run, second)
    weights.staging.release()

    may_go_on.set()
    assert reader._turn.acquire(timeout=LIMIT_S)  # until it has ended
    reader._turn.release()

    assert not stage(weights, run, second).read_here


def test_another_version_that_an_engine_still_needs_is_waited_for_with_a_deadline(
    run: RunDir, start: Path, sums: None, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, reader = publish_version(run, 1), publish_version(run, 2), agent(run, start)
    _, slow = an_engine(run, start)
    stage(slow, run, first)

    with reading(reader, second, deadline_s=0.05):
        reader._turn.acquire(timeout=LIMIT_S)  # until it has given up
        reader._turn.release()

    assert "an instance that holds another version" in capsys.readouterr().out


def test_the_last_one_to_leave_removes_the_memory(run: RunDir, start: Path, sums: None) -> None:
    manifest, reader = publish_version(run, 1), agent(run, start)
    _, weights = an_engine(run, start)
    with reading(reader, manifest):
        stage(weights, run, manifest)
    assert weights.staging._segment is not None
    weights.staging._segment.close()

    leave_memory_folder(run.run_id)
    assert os.listdir(memory_folder._SHARED_MEMORY)  # the agent is there
    reader.close()
    leave_memory_folder(run.run_id)

    assert os.listdir(memory_folder._SHARED_MEMORY) == []


def test_a_reader_that_never_comes_back_keeps_neither_its_agent_nor_the_memory(
    run: RunDir, start: Path, sums: None, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_reader, "_LAST_PIECE_S", 0.05)
    manifest, reader = publish_version(run, 1), agent(run, start)
    _, weights = an_engine(run, start)
    give_up_a_reading(reader, manifest, held)
    assert weights.staging._segment is not None
    weights.staging._segment.close()

    reader.close()
    leave_memory_folder(run.run_id)

    assert os.listdir(memory_folder._SHARED_MEMORY) == []
    assert reader._joined is not None  # what it works with is not closed under it
    held.may_go_on.set()
    with reader._turn:
        pass  # until it has come back
