"""Which instance gets the next request, judged from registrations and from what failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from planner.plan import InstancePlacement
from stages.controller.instances import COOL_DOWN_S, LONGEST_COOL_DOWN_S, LOOK_PERIOD_S, InstancePool
from stages.rundir import RunDir
from stages.weights.instances import InstanceStatus, write_status

TIMEOUT_S = 5.0
STATUS = InstanceStatus("rollout_000", "ready", "http://127.0.0.1:1", "host", 0, "d", 1, 1, 1, "cpu", 1)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def pool_of(run: RunDir, tps: tuple[int, ...] = (1, 1), *, keeps: bool = True) -> tuple[InstancePool, Clock]:
    clock = Clock()
    placements = tuple(InstancePlacement(f"rollout_{i:03d}", tp, 1, 0) for i, tp in enumerate(tps))
    return InstancePool(run, placements, TIMEOUT_S, keeps, clock), clock


def register(run: RunDir, index: int, state: str = "ready", heartbeat: int = 1, **changes: Any) -> None:
    name = f"rollout_{index:03d}"
    status = replace(STATUS, instance=name, state=state, heartbeat=heartbeat, **changes)
    write_status(RunDir(run.root, run.run_id, run.attempt, name), status)


def names(pool: InstancePool) -> list[str]:
    return [instance.name for instance in pool.usable()]


def test_only_registered_instances_are_usable(run: RunDir) -> None:
    pool, _ = pool_of(run)
    register(run, 1)

    assert names(pool) == ["rollout_001"]


@pytest.mark.parametrize(
    "state, keeps, usable",
    [("reloading", True, True), ("reloading", False, False), ("starting", True, False), ("stopping", True, False)],
)
def test_a_reloading_instance_is_usable_only_if_it_keeps_requests(
    run: RunDir, state: str, keeps: bool, usable: bool
) -> None:
    pool, _ = pool_of(run, keeps=keeps)
    register(run, 0, state)

    assert bool(names(pool)) is usable


def test_an_instance_whose_counter_stands_still_counts_as_dead(run: RunDir) -> None:
    pool, clock = pool_of(run)
    register(run, 0)
    register(run, 1)
    pool.look()
    clock.now += TIMEOUT_S
    register(run, 1, heartbeat=2)

    assert names(pool) == ["rollout_001"]
    assert "rollout_000 (ready; no heartbeat for 5 s)" in pool.describe()


def test_the_least_loaded_instance_for_its_size_is_claimed(run: RunDir) -> None:
    pool, _ = pool_of(run, tps=(1, 4))
    register(run, 0)
    register(run, 1)

    claimed = [pool.claim(pool.usable(), 8).name for _ in range(5)]

    assert claimed.count("rollout_001") == 4
    assert claimed.count("rollout_000") == 1


def test_a_released_instance_is_free_again(run: RunDir) -> None:
    pool, _ = pool_of(run)
    register(run, 0)
    instance = pool.claim(pool.usable(), 8)

    pool.release(instance, 8)

    assert instance.load == 0


def test_an_instance_that_fails_is_left_alone_for_longer_each_time(run: RunDir) -> None:
    pool, clock = pool_of(run, tps=(1,))
    register(run, 0)
    instance = pool.instances["rollout_000"]
    pauses = []
    for heartbeat in range(2, 9):
        pool.failed(instance, interrupted=False)
        pauses.append(instance.cool_until_s - clock.now)
        assert names(pool) == []
        clock.now = instance.cool_until_s + LOOK_PERIOD_S
        register(run, 0, heartbeat=heartbeat)
        assert names(pool) == ["rollout_000"]

    assert pauses[0] == pytest.approx(COOL_DOWN_S)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LONGEST_COOL_DOWN_S)


def test_requests_that_fail_together_count_once(run: RunDir) -> None:
    pool, _ = pool_of(run)
    instance = pool.instances["rollout_000"]

    for _ in range(64):
        pool.failed(instance, interrupted=False)

    assert instance.failures_in_a_row == 1


def test_a_success_ends_the_suspicion(run: RunDir) -> None:
    pool, clock = pool_of(run, tps=(1,))
    instance = pool.instances["rollout_000"]
    for _ in range(4):
        pool.failed(instance, interrupted=False)
        clock.now = instance.cool_until_s

    pool.succeeded(instance)
    pool.failed(instance, interrupted=False)

    assert instance.cool_until_s - clock.now == pytest.approx(COOL_DOWN_S)


def test_a_request_cut_off_by_a_reload_is_no_fault_of_the_instance(run: RunDir) -> None:
    pool, _ = pool_of(run)
    register(run, 0, "reloading")

    assert pool.is_interrupted("rollout_000")
    pool.failed(pool.instances["rollout_000"], interrupted=True)
    assert pool.instances["rollout_000"].failures_in_a_row == 0


def test_an_instance_that_has_not_proved_a_version_gets_no_request(run: RunDir) -> None:
    pool, _ = pool_of(run)
    register(run, 0, version=-1)
    register(run, 1)

    assert names(pool) == ["rollout_001"]


def test_an_instance_that_is_behind_what_the_run_serves_gets_no_request_until_it_has_caught_up(run: RunDir) -> None:
    pool, clock = pool_of(run)
    register(run, 0, version=4)
    register(run, 1, version=5)
    pool.advance(5)

    assert names(pool) == ["rollout_001"]
    assert "rollout_000 (ready; at version 4 while the run is at 5)" in pool.describe()
    register(run, 0, version=5)
    clock.now += 1.0
    assert names(pool) == ["rollout_000", "rollout_001"]


def test_what_was_read_before_the_run_moved_on_does_not_count(run: RunDir) -> None:
    pool, _ = pool_of(run)
    register(run, 0, version=4)
    assert names(pool) == ["rollout_000"]
    register(run, 0, version=5)

    pool.advance(5)

    assert names(pool) == ["rollout_000"]


def fate(run: RunDir, meanwhile: Callable[[int], None]) -> tuple[InstancePool, bool]:
    """Whether the pool finds that rollout_000 has died, with `meanwhile(look)` at each of its looks."""
    pool, clock = pool_of(run)
    register(run, 0, heartbeat=5)
    pool.look(force=True)
    look = pool.look
    looks = 0

    def next_look(*, force: bool = False) -> None:
        nonlocal looks
        meanwhile(looks)
        looks, clock.now = looks + 1, clock.now + 0.5
        look(force=True)

    pool.look = next_look  # type: ignore[method-assign]
    died = asyncio.run(pool.has_died(pool.instances["rollout_000"]))
    pool.look = look  # type: ignore[method-assign]
    return pool, died


def test_an_instance_whose_heart_stopped_with_a_request_has_died_and_is_left_alone(run: RunDir) -> None:
    pool, died = fate(run, lambda _: None)

    assert died
    assert names(pool) == []
    assert "rollout_000 (dead" in pool.describe()


def test_an_instance_whose_heart_beats_on_lives(run: RunDir) -> None:
    _, died = fate(run, lambda look: register(run, 0, heartbeat=5 + look))

    assert not died


@pytest.mark.parametrize("change", [{"state": "stopping"}, {"incarnation": 1, "state": "starting"}, {"incarnation": 1}])
def test_an_instance_that_leaves_or_has_a_successor_has_died(run: RunDir, change: dict[str, Any]) -> None:
    _, died = fate(run, lambda look: register(run, 0, heartbeat=6 + look, **change))

    assert died


def test_a_dead_instance_is_used_again_when_its_replacement_has_proved_its_weights(run: RunDir) -> None:
    pool, _ = fate(run, lambda _: None)

    register(run, 0, incarnation=1, version=-1)
    pool.look(force=True)
    before = names(pool)
    register(run, 0, incarnation=1, version=3)
    pool.look(force=True)

    assert (before, names(pool)) == ([], ["rollout_000"])


def test_a_replacement_is_waited_for_while_nobody_else_can_answer(run: RunDir) -> None:
    pool, _ = fate(run, lambda _: None)
    pool.absence_s = 60.0

    assert pool.is_waiting_for_a_replacement()
    register(run, 1)
    pool.look(force=True)
    assert not pool.is_waiting_for_a_replacement()


def test_nobody_waits_for_ever_for_an_instance_that_does_not_come_back(run: RunDir) -> None:
    pool, _ = fate(run, lambda _: None)
    pool.absence_s = 60.0
    clock = pool.clock
    assert isinstance(clock, Clock)
    clock.now += 61.0

    assert not pool.is_waiting_for_a_replacement()
