"""How long the trainer waits for answers: silent instances, late ones, replaced ones, and those that were given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from launch.desired_steps import desired_steps
from stages.desired import write_desired
from stages.members import write_given_up
from stages.rundir import RunDir
from stages.weights.errors import InstanceLateError, InstanceSilentError
from stages.weights.instances import InstanceStatus
from stages.weights.patience import AWAY_BEATS, Patience, absence_s, load_s, replacements_s
from tests.fake_runs import fake_config, fake_plan
from tests.weights_kit import INSTANCES, register

NAME = "rollout_000"
DEADLINE_S = 600.0


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def patience(run: RunDir, clock: Clock, config: LibraConfig | None = None) -> Patience:
    config = config or LibraConfig()
    config.rollout.heartbeat_timeout_s = 10.0
    return Patience(run, config, INSTANCES, DEADLINE_S, clock)


def judge(watch: Patience, missing: Sequence[str]) -> None:
    """One look; raises what it finds to be wrong with the instances."""
    watch.check(missing)
    for failure in watch.failures.values():
        raise failure


def supervised(run: RunDir, max_replacements: int = 3) -> None:
    """A supervisor that replaces instances, as the desired state says."""
    config = fake_config()
    config.rollout.max_replacements = max_replacements
    write_desired(replace(run, writer="launcher"), desired_steps(config, fake_plan()))


def test_a_moving_counter_is_life_however_slow_the_clock_of_its_host(run: RunDir) -> None:
    clock = Clock()
    watch = patience(run, clock)
    for beat in range(20):
        register(run, NAME, heartbeat=beat)
        judge(watch, [NAME])
        clock.now_s += 9


def test_a_counter_that_stands_still_is_a_dead_instance_where_nobody_replaces_it(run: RunDir) -> None:
    clock = Clock()
    watch = patience(run, clock)
    register(run, NAME, heartbeat=7, state="reloading")
    judge(watch, [NAME])
    clock.now_s += 9.9
    judge(watch, [NAME])
    clock.now_s += 1.1

    with pytest.raises(InstanceSilentError, match=r"rollout_000 \(last state 'reloading'\).* 11\.0 s"):
        judge(watch, [NAME])


def test_replacements_that_the_options_rule_out_are_not_waited_for(run: RunDir) -> None:
    clock = Clock()
    supervised(run, max_replacements=0)
    watch = patience(run, clock)
    register(run, NAME, heartbeat=7)
    judge(watch, [NAME])
    clock.now_s += 10.0

    with pytest.raises(InstanceSilentError):
        judge(watch, [NAME])


def test_an_instance_that_has_not_registered_has_only_the_deadline(run: RunDir) -> None:
    clock = Clock()
    watch = patience(run, clock)
    clock.now_s += DEADLINE_S - 1.0
    judge(watch, [NAME])
    clock.now_s += 1.0

    with pytest.raises(InstanceLateError, match=r"600\.0 s"):
        judge(watch, [NAME])


def test_an_instance_that_has_answered_is_not_judged(run: RunDir) -> None:
    clock = Clock()
    watch = patience(run, clock)
    register(run, NAME, heartbeat=7)
    judge(watch, INSTANCES)
    clock.now_s += DEADLINE_S

    judge(watch, [])


def test_a_silent_instance_that_is_replaced_is_waited_for(run: RunDir) -> None:
    clock = Clock()
    supervised(run)
    watch = patience(run, clock)
    register(run, NAME, heartbeat=7)
    judge(watch, [NAME])
    clock.now_s += 2 * 10.0
    judge(watch, [NAME])  # silent for longer than heartbeat_timeout_s
    register(run, NAME, heartbeat=1, incarnation=1, state="starting")

    judge(watch, [NAME])


def test_one_that_dies_just_before_the_deadline_gets_the_time_to_come_back_and_to_load(run: RunDir) -> None:
    clock = Clock()
    supervised(run)
    config = LibraConfig()
    watch = patience(run, clock, config)
    register(run, NAME, heartbeat=7)
    clock.now_s += DEADLINE_S - 5.0
    judge(watch, [NAME])
    clock.now_s += 5.0
    judge(watch, [NAME])
    clock.now_s += absence_s(config) - 10.0
    register(run, NAME, heartbeat=1, incarnation=1, state="starting")
    judge(watch, [NAME])
    beat = 1
    for _ in range(int(load_s(config) / 9.0)):
        clock.now_s += 9.0
        beat += 1
        register(run, NAME, heartbeat=beat, incarnation=1, state="starting")
        judge(watch, [NAME])
    clock.now_s += 10.0
    register(run, NAME, heartbeat=beat + 1, incarnation=1, state="reloading")

    with pytest.raises(InstanceLateError):
        judge(watch, [NAME])


def test_one_that_never_comes_back_has_an_end_too(run: RunDir) -> None:
    clock = Clock()
    supervised(run)
    config = LibraConfig()
    watch = patience(run, clock, config)
    register(run, NAME, heartbeat=7)
    judge(watch, [NAME])
    clock.now_s += max(DEADLINE_S, absence_s(config)) + 1.0

    with pytest.raises(InstanceLateError):
        judge(watch, [NAME])


def test_an_instance_that_lives_and_does_not_answer_gets_no_more_time(run: RunDir) -> None:
    clock = Clock()
    supervised(run)
    watch = patience(run, clock)
    register(run, NAME, heartbeat=0)
    judge(watch, [NAME])
    for beat in range(1, int(DEADLINE_S)):
        clock.now_s += 1.0
        register(run, NAME, heartbeat=beat)
        judge(watch, [NAME])
    clock.now_s += 1.0
    register(run, NAME, heartbeat=int(DEADLINE_S))

    with pytest.raises(InstanceLateError):
        judge(watch, [NAME])


def test_an_instance_that_was_given_up_is_not_awaited(run: RunDir) -> None:
    clock = Clock()
    supervised(run)
    watch = patience(run, clock)
    write_given_up(replace(run, writer="supervisor"), {NAME: "its node failed"})

    judge(watch, INSTANCES)

    assert list(watch.given_up) == [NAME]


def test_an_instance_that_is_being_replaced_is_away(run: RunDir) -> None:
    supervised(run)
    watch = patience(run, Clock())
    register(run, "rollout_000", incarnation=1, version=-1, state="starting")
    register(run, "rollout_001", state="stopping", version=3)

    watch.check(INSTANCES)

    assert "start 1 of instance rollout_000" in watch.away["rollout_000"]
    assert "ending" in watch.away["rollout_001"]


def test_the_first_start_of_an_instance_is_no_absence(run: RunDir) -> None:
    supervised(run)
    watch = patience(run, Clock())
    register(run, "rollout_000", state="starting")

    watch.check(INSTANCES)

    assert watch.away == {}


def test_a_silent_instance_that_is_replaced_is_away(run: RunDir) -> None:
    clock = Clock()
    supervised(run)
    watch = patience(run, clock)
    register(run, NAME, heartbeat=7)
    watch.check([NAME])
    clock.now_s += 10.0
    watch.check([NAME])

    assert "not moved its heartbeat for 10.0 s" in watch.away[NAME]
    assert watch.failures == {}


def test_an_instance_that_is_asked_again_gets_the_time_for_it(run: RunDir) -> None:
    clock = Clock()
    watch = patience(run, clock)
    clock.now_s += DEADLINE_S - 1.0
    watch.asked_again("rollout_000")
    clock.now_s += 2.0
    watch.check(INSTANCES)

    assert list(watch.failures) == ["rollout_001"]


def test_registrations_are_not_read_more_often_than_needed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    looks: list[str] = []

    def read(run: RunDir, names: Sequence[str]) -> dict[str, InstanceStatus]:
        looks.extend(names)
        return {}

    monkeypatch.setattr("stages.weights.patience.read_statuses", read)
    watch = patience(run, clock)
    for _ in range(1000):
        judge(watch, [NAME])
        clock.now_s += 0.01

    assert len(looks) <= 11


def test_what_waits_for_an_instance_knows_how_long_replacements_may_take() -> None:
    config = LibraConfig()

    assert replacements_s(config) == 3 * (absence_s(config) + load_s(config))
    config.rollout.max_replacements = 0
    assert replacements_s(config) == 0
    assert AWAY_BEATS * config.rollout.heartbeat_interval_s < config.rollout.heartbeat_timeout_s
