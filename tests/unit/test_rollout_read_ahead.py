"""The agent reads what the trainer has not published yet, and leaves the memory to others in time."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stages.rollout import node_reader, read_ahead
from stages.rollout.engine_weights import EngineWeights
from stages.rollout.node_reader import NodeReader
from stages.rundir import RunDir
from stages.weights.progress import ProgressWriter
from stages.weights.publish import Publisher
from tests.engine_kit import EngineModel, run, stage
from tests.read_ahead_kit import (
    LIMIT_S,
    agent,
    as_a_gpu_does,
    awaited,
    ended,
    looked_ahead,
    publisher,
    read_again,
    served,
    start,
    take_over,
    written,
)
from tests.weights_kit import make_publisher

__all__ = ["agent", "as_a_gpu_does", "publisher", "read_again", "run", "served", "start"]

pytestmark = pytest.mark.usefixtures("as_a_gpu_does")


def test_what_was_read_ahead_is_not_read_again(
    run: RunDir,
    agent: NodeReader,
    publisher: Publisher,
    served: tuple[EngineModel, EngineWeights],
    read_again: list[str],
) -> None:
    for version in (1, 2, 3):
        publication = written(publisher, version)
        looked_ahead(agent)
        manifest = publication.finish()

        assert take_over(agent, run, served, manifest) == (False, True)

    assert read_again == []


def test_a_version_is_whole_in_the_memory_before_anybody_asks_for_it(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    publication = written(publisher, 1)
    looked_ahead(agent)
    manifest = publication.finish()
    ended(agent)

    assert not stage(served[1], run, manifest).read_here


def test_an_order_that_comes_while_it_is_completed_is_given_at_once(
    run: RunDir,
    agent: NodeReader,
    publisher: Publisher,
    served: tuple[EngineModel, EngineWeights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_pause(_: float) -> None:
        raise AssertionError("it waited before the order was given")

    publication = written(publisher, 1)
    looked_ahead(agent)
    manifest = publication.finish()

    with agent.reading(1, manifest.digest, deadline_s=LIMIT_S, pause=no_pause):
        assert not stage(served[1], run, manifest).read_here


# ---- ends -------------------------------------------------------------------------------------------------------------


def test_a_publication_that_is_given_up_leaves_the_memory_free_and_without_a_name(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    with make_publisher(run) as failing:
        publication = written(failing, 1)
        looked_ahead(agent)
        publication.close()
    ended(agent)

    assert served[1].staging._segment is not None
    assert served[1].staging._segment.name() == ""
    assert take_over(agent, run, served, written(publisher, 2).finish()) == (False, True)


def test_a_trainer_that_finishes_no_part_for_long_does_not_keep_the_memory(
    run: RunDir,
    agent: NodeReader,
    publisher: Publisher,
    served: tuple[EngineModel, EngineWeights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_ahead, "_PATIENCE_S", 0.05)
    publication = written(publisher, 1)
    looked_ahead(agent)

    ended(agent)

    agent.look_ahead(0)  # not once more: it is the same folder
    assert not agent._ahead or agent._ahead.over.is_set()
    assert take_over(agent, run, served, publication.finish()) == (False, True)


def test_a_newer_version_that_is_asked_for_ends_the_reading_of_an_older_one(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    newer = written(publisher, 2).finish()
    stuck = run.weights / ".v000001.tmp-0-0123abcd"
    stuck.mkdir()
    ProgressWriter(stuck, 0).tell()  # of a trainer that goes no further
    agent.look_ahead(0)
    assert agent._ahead is not None

    assert take_over(agent, run, served, newer) == (False, True)
    assert agent._ahead.over.is_set()


def test_a_newer_version_that_is_begun_ends_the_reading_of_an_older_one(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    stuck = run.weights / ".v000001.tmp-0-0123abcd"
    stuck.mkdir()
    ProgressWriter(stuck, 0).tell()
    agent.look_ahead(0)
    publication = written(publisher, 2)

    agent.look_ahead(0)
    ended(agent)
    looked_ahead(agent)

    assert take_over(agent, run, served, publication.finish()) == (False, True)


def test_memory_that_an_engine_still_needs_is_left_to_it(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    first = written(publisher, 1).finish()
    held = stage(served[1], run, first)
    publication = written(publisher, 2)

    agent.look_ahead(1)
    ended(agent)

    assert served[1].swap(held)["fault"] == ""
    served[1].staging.release()
    assert take_over(agent, run, served, publication.finish()) == (False, True)


def test_what_a_killed_trainer_left_replaces_nothing_newer(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    publication = written(publisher, 2)
    looked_ahead(agent)
    manifest = publication.finish()
    left = run.weights / ".v000001.tmp-0-0123abcd"
    left.mkdir()
    ProgressWriter(left, 0).tell()

    agent.look_ahead(0)
    ended(agent)
    agent.look_ahead(0)

    assert not stage(served[1], run, manifest).read_here


def test_an_agent_that_leaves_ends_its_reading(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: Any
) -> None:
    publication = written(publisher, 1)
    looked_ahead(agent)

    agent.close()

    assert agent._ahead is not None
    assert agent._ahead.over.is_set()
    assert agent._joined is None
    publication.finish()


# ---- the agent goes on ------------------------------------------------------------------------------------------------


def test_looking_does_not_wait_for_who_makes_the_memory(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    publication = written(publisher, 1)
    (path,) = (run.root.parent / "shm").glob("*/weights-*[!k]")
    with path.open("r+b") as made:
        fcntl.flock(made, fcntl.LOCK_EX)  # as an engine does that starts beside this one
        looking = threading.Thread(target=agent.look_ahead, args=(0,))
        looking.start()
        looking.join(LIMIT_S)
        is_waiting = looking.is_alive()
    looking.join()

    assert not is_waiting
    assert take_over(agent, run, served, publication.finish()) == (False, True)


def test_a_folder_of_the_start_that_is_damaged_is_said_and_the_engine_reads(
    run: RunDir,
    agent: NodeReader,
    publisher: Publisher,
    served: tuple[EngineModel, EngineWeights],
    start: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    publication = written(publisher, 1)
    (start / "config.json").write_text("{")

    agent.look_ahead(0)
    ended(agent)

    assert "version 1 was not read ahead of the engine" in capsys.readouterr().out
    assert take_over(agent, run, served, publication.finish()) == (True, True)


def test_readings_leave_neither_files_nor_threads(
    run: RunDir, agent: NodeReader, publisher: Publisher, served: tuple[EngineModel, EngineWeights]
) -> None:
    counts = []
    for version in range(1, 9):
        publication = written(publisher, version)
        looked_ahead(agent)
        assert take_over(agent, run, served, publication.finish()) == (False, True)
        awaited("the end of its threads", lambda: not _readers())
        counts.append(_open_files(run.root.parent))

    assert counts[1:] == [counts[1]] * len(counts[1:])


def _readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("ahead", "read-ahead", "node-"))]


def _open_files(folder: Path) -> int:
    """Of this process, in `folder`, whether they still have a name or not."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(path.startswith(f"{folder}/") for path in found)


@pytest.mark.parametrize("what", ["folder", "thread"])
def test_where_nothing_is_to_be_had_the_agent_says_so_once_and_reads_when_it_is_asked(
    run: RunDir,
    agent: NodeReader,
    publisher: Publisher,
    served: tuple[EngineModel, EngineWeights],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, "no more files") if what == "folder" else RuntimeError("can't start new thread")

    publication = written(publisher, 1)
    with monkeypatch.context() as short:
        if what == "folder":
            short.setattr(node_reader, "unfinished", fails)
        else:
            short.setattr(threading.Thread, "start", fails)
        agent.look_ahead(0)
        agent.look_ahead(0)

    said = "no more files" if what == "folder" else "can't start new thread"
    assert capsys.readouterr().out.count(said) == 1
    assert take_over(agent, run, served, publication.finish()) == (False, True)
