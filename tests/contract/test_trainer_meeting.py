"""How trainer ranks meet, with real processes: out of other users' reach on one host, at one address otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from planner.plan import TrainLayout
from stages.context import StageContext, open_context
from stages.files import write_bytes_atomic
from stages.rollout.node_folder import node_folder_path
from stages.rundir import RunDir
from stages.trainer import meeting as module
from stages.trainer.meeting import MeetingError, meeting
from tests.fake_runs import fake_config, fake_plan, fake_run
from tests.meeting_worker import RANKS
from tests.network_kit import listening

ADDRESS = "127.0.0.7"
"""Stands for the one address by which other nodes reach this one; not what "all addresses" or "localhost" would be."""


def made(root: Path, nodes: int) -> RunDir:
    layout = TrainLayout(RANKS, nodes, RANKS // nodes, 1, 1, 1, RANKS, 1)
    return fake_run(root, fake_config(), replace(fake_plan(), train=layout))


@contextmanager
def context_of(run: RunDir, rank: int, world_size: int = RANKS) -> Iterator[StageContext]:
    with open_context("trainer", run.root, name="trainer", rank=rank, world_size=world_size) as context:
        yield context


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return made(tmp_path_factory.mktemp("meeting") / "run", nodes=1)


@pytest.fixture(scope="module")
def seen(run: RunDir) -> dict[str, object]:
    """What can be seen of two ranks of one host that have met, and of what they leave."""
    with ExitStack() as stack:
        command = [sys.executable, "-m", "tests.meeting_worker", str(run.root)]
        ranks = [stack.enter_context(subprocess.Popen([*command, str(rank)])) for rank in range(RANKS)]
        deadline_s = time.monotonic() + 90
        while not all((run.root / f"met.{rank}").exists() for rank in range(RANKS)):
            assert time.monotonic() < deadline_s
            assert [rank.poll() for rank in ranks] == [None] * RANKS
            time.sleep(0.05)
        place = json.loads((run.attempt_dir / "rendezvous.json").read_text())
        path = Path(place["file"])
        found = {"place": place, "modes": [path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777]}
        found["listening"] = {address for address, _ in listening(rank.pid for rank in ranks)}
        write_bytes_atomic(run.root / "go", b"")
        found["codes"] = [rank.wait(timeout=60) for rank in ranks]
    return found


def test_ranks_of_one_host_meet_in_a_file_that_only_they_can_open(seen: dict[str, object], run: RunDir) -> None:
    assert seen["modes"] == [0o600, 0o700]
    assert Path(seen["place"]["file"]).parent == node_folder_path(run.run_id)  # type: ignore[index]


def test_the_last_rank_of_a_host_takes_the_runs_folder_along(seen: dict[str, object], run: RunDir) -> None:
    assert not node_folder_path(run.run_id).exists()


def test_ranks_of_one_host_listen_on_loopback_only(seen: dict[str, object]) -> None:
    assert seen["listening"] == {"127.0.0.1"}


def test_ranks_that_met_end_well_and_leave_no_file(seen: dict[str, object]) -> None:
    assert seen["codes"] == [0, 0]
    assert not Path(seen["place"]["file"]).exists()  # type: ignore[index]


def test_a_lone_rank_opens_no_port(tmp_path: Path) -> None:
    with context_of(made(tmp_path / "run", nodes=1), 0, world_size=1) as context, meeting(context) as store:
        assert isinstance(store, HashStore)


def test_ranks_of_several_hosts_meet_at_the_address_that_the_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "node_address", lambda: ADDRESS)
    run = made(tmp_path / "run", nodes=2)
    before = listening([os.getpid()])

    with (
        context_of(run, 0) as first,
        meeting(first) as served,
        context_of(run, 1) as second,
        meeting(second) as reached,
    ):
        served.set("key", "value")
        opened = listening([os.getpid()]) - before
        assert isinstance(reached, TCPStore)
        assert reached.get("key") == b"value"

    place = json.loads((run.attempt_dir / "rendezvous.json").read_text())
    assert opened == {(ADDRESS, place["port"])}


def test_a_rank_that_does_not_see_the_file_says_what_is_missing(tmp_path: Path) -> None:
    run = made(tmp_path / "run", nodes=1)
    run.write(run.attempt_dir / "rendezvous.json", {"file": str(tmp_path / "elsewhere"), "world_size": RANKS})

    with (
        context_of(run, 1) as context,
        pytest.raises(MeetingError, match="rank 0 is not there for rank 1: they need one TMPDIR on a node"),
        meeting(context),
    ):
        pass
