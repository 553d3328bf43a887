"""What a trainer rank does beside its training: in one thread, and every way that it can end (ranks are threads here)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from stages.rundir import FencedError, RunDir
from stages.stopping import StopRequest, write_stop_request
from stages.trainer import refresher as module
from stages.trainer.refresher import Refresher, ServeError, ServingFailedError
from stages.weights.errors import PublishError, WeightRefreshError
from stages.weights.ranks import RankGroup
from stages.weights.reader import load_manifest
from stages.weights.tensors import LocalTensor
from stages.weights.writer import RankWriter
from tests.weights_kit import PROBE, as_writer, make_context, make_source, run_ranks

WAIT_S = 10.0
RANKS = 2


def say_nothing(*_: Any) -> None:
    """Every instance serves the version."""


def refuse(*_: Any) -> None:
    raise WeightRefreshError(0, ("rollout_000",), "worn out")


def lose_the_network(*_: Any) -> None:
    raise ConnectionError("gone")


def wait_for_a_wish(
    _context: Any, _manifest: Any, _instances: Any, _publish_s: float, check: Callable[[], None]
) -> None:
    pause = threading.Event()
    while not pause.wait(0.005):
        check()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    make_source(tmp_path / "source")
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def refreshers(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs `body(refresher)` on RANKS ranks, whose instances answer as `sync` does; gives the results or errors."""
    # The thread that trains and the one beside it have a group each.
    monkeypatch.setattr(module, "TrainerRanks", lambda grid, group=None: group or grid.bytes_group)
    monkeypatch.setattr(module, "collective_timeout_s", lambda _context: WAIT_S)

    def start(body: Callable[[Refresher], Any], sync: Callable[..., None] = say_nothing) -> list[Any]:
        monkeypatch.setitem(module.SYNCS, "restart", sync)
        groups: list[list[RankGroup]] = [
            [future.result() for future in run_ranks(RANKS, lambda rank: rank)] for _ in "ab"
        ]

        def rank(me: RankGroup) -> Any:
            with make_refresher(run, groups[0][me.rank], groups[1][me.rank]) as refresher:
                return body(refresher)

        return [future.exception() or future.result() for future in run_ranks(RANKS, rank)]

    return start


def make_refresher(run: RunDir, training: RankGroup, beside: RankGroup) -> Refresher:
    context = make_context(run)
    context.config.model_path = str(run.root.parent / "source")
    is_first = training.rank == 0
    grid = SimpleNamespace(
        bytes_group=training, refresh_group=beside, device=torch.device("cpu"), is_first=is_first, rank=training.rank
    )
    checkpoints = SimpleNamespace(first_needed_batch=lambda steps: steps)
    return Refresher(context, cast(Any, grid), cast(Any, checkpoints))


def begin(refresher: Refresher, version: int = 0) -> None:
    tensors = [LocalTensor.whole(f"of_{refresher.grid.rank}", torch.ones(4))]
    refresher.begin(version, tensors, PROBE)


def to_the_end(refresher: Refresher) -> None:
    begin(refresher)
    refresher.finish()
    refresher.raise_failure()


def test_versions_follow_each_other_and_nothing_has_failed(refreshers: Any, run: RunDir) -> None:
    def body(refresher: Refresher) -> bool:
        for version in range(3):
            begin(refresher, version)
        refresher.finish()
        refresher.raise_failure()
        return refresher.has_failed

    assert refreshers(body) == [False] * RANKS
    assert 2 in run.published_versions()


def test_the_last_version_of_a_run_is_a_complete_folder(refreshers: Any, run: RunDir) -> None:
    def body(refresher: Refresher) -> None:
        context = refresher.context
        context.config.weights.delta, context.config.total_steps = "sparse", 2
        for version in range(3):
            begin(refresher, version)
        refresher.finish()
        refresher.raise_failure()

    assert refreshers(body) == [None] * RANKS
    assert [load_manifest(run, version).delta is None for version in (1, 2)] == [False, True]


def test_a_refusal_is_raised_with_its_own_type_on_all_ranks(refreshers: Any) -> None:
    errors = refreshers(to_the_end, refuse)

    assert [(type(error), error.args) for error in errors] == [
        (WeightRefreshError, (0, ("rollout_000",), "worn out"))
    ] * 2


def test_what_one_rank_cannot_write_is_raised_on_all_ranks(
    refreshers: Any, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, finish = threading.Lock(), RankWriter.finish

    def fail_once(*arguments: Any, **options: Any) -> Any:
        if failing.acquire(blocking=False):
            raise OSError("the disk is gone")
        return finish(*arguments, **options)

    monkeypatch.setattr(RankWriter, "finish", fail_once)

    errors = refreshers(to_the_end)

    assert [type(error) for error in errors] == [PublishError] * RANKS
    assert str(errors[0]) == str(errors[1])
    assert "OSError: the disk is gone" in str(errors[0])
    assert not run.published_versions()


def test_any_other_failure_names_the_rank(refreshers: Any) -> None:
    errors = refreshers(to_the_end, lose_the_network)

    assert [type(error) for error in errors] == [ServeError] * RANKS
    assert "trainer rank 0 of 2: ConnectionError: gone" in str(errors[1])


def test_a_collection_that_fails_on_rank_0_alone_is_raised_on_all_ranks(
    refreshers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fenced(*_: Any, **__: Any) -> None:
        raise FencedError("a newer attempt")

    monkeypatch.setattr(module, "collect", fenced)

    assert [type(error) for error in refreshers(to_the_end)] == [FencedError] * RANKS


def test_a_failure_ends_the_wait_of_a_rank_that_waits_for_something_else(refreshers: Any) -> None:
    def body(refresher: Refresher) -> None:
        begin(refresher)
        refresher.wait()
        refresher.check()

    assert [type(error) for error in refreshers(body, refuse)] == [ServingFailedError] * RANKS


def test_a_fault_of_the_program_ends_its_rank_where_it_looks(refreshers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: Any, **__: Any) -> None:
        raise TypeError("a fault")

    monkeypatch.setattr(module, "collect", faulty)

    def body(refresher: Refresher) -> None:
        begin(refresher)
        refresher.finish()

    assert [type(error) for error in refreshers(body)] == [TypeError, type(None)]


def test_a_stop_request_cuts_the_wait_for_the_instances_short(refreshers: Any, run: RunDir) -> None:
    write_stop_request(as_writer(run, "supervisor"), StopRequest("checkpoint", "time limit", 1.0))

    assert refreshers(to_the_end, wait_for_a_wish) == [None] * RANKS


def test_a_rank_that_leaves_does_not_stay_for_the_instances(refreshers: Any) -> None:
    assert refreshers(begin, wait_for_a_wish) == [None] * RANKS


def test_parameters_may_change_as_soon_as_a_version_is_begun(refreshers: Any, run: RunDir) -> None:
    def body(refresher: Refresher) -> None:
        tensor = torch.ones(1 << 16)
        refresher.begin(0, [LocalTensor.whole(f"of_{refresher.grid.rank}", tensor)], PROBE)
        tensor.zero_()
        refresher.finish()

    refreshers(body)

    published = load_file(run.weights_version(0) / "model.safetensors")
    assert all(bool((tensor == 1).all()) for tensor in published.values())
