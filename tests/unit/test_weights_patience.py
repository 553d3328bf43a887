"""How long the trainer waits for answers: silent instances, late ones, replaced ones, and those that were given up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from launch.desired_steps import desired_steps
from stages.desired import write_desired
from stages.files import WaitTimeoutError
from stages.members import write_given_up
from stages.rundir import RunDir
from stages.weights.errors import InstanceSilentError
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
        watch.check([NAME])
        clock.now_s += 9


def test_a_counter_that_stands_still_is_a_dead_instance_where_nobody_replaces_it(run: RunDir) -> None:
    clock = Clock()
    watch = patience(run, clock)
    register(run, NAME, heartbeat=7, state="reloading")
    watch.check([NAME])
    clock.now_s += 9.9
    watch.check([NAME])
    clock.now_s += 1.1

    with pytest.raises(InstanceSilentError, match=r"rollout_000 \(last state 'reloading'\).* 11\.0 s"):
        watch.check([NAME])


def test_replacements_that_the_options_rule_out_are_not_waited_for(run: RunDir) -> None:
    clock = Clock()
    supervised(run, max_replacements=0)
    watch = patience(run, clock)
    register(run, NAME, heartbeat=7)
    watch.check([NAME])
    clock.now_s += 10.0

    with pytest.raises(InstanceSilentError):
        watch.check([NAME])


def test_an_instance_that_has_not_registered_has_only_the_deadline(run: RunDir) -> None:
    clock = Clock()
    watch = patience(run, clock)
    clock.now_s += DEADLINE_S - 1.0
    watch.check([NAME])
    clock.now_s += 1.0

    with pytest.raises(WaitTimeoutError, match="all ACKs"):
        watch.check([NAME])


def test_an_instance_that_has_answered_is_not_judged(run: RunDir) -> None:
    clock = Clock()
    watch = patience(run, clock)
    register(run, NAME, heartbeat=7)
    watch.check(INSTANCES)
    clock.now_s += DEADLINE_S

    watch.check([])


def test_a_silent_instance_that_is_replaced_is_waited_for(run: RunDir) -> None:
    clock = Clock()
    supervised(run)
    watch = patience(run, clock)
    register(run, NAME, heartbeat=7)
    watch.check([NAME])
    clock.now_s += 2 * 10.0
    watch.check([NAME])  # silent for longer than heartbeat_timeout_s
    register(run, NAME, heartbeat=1, incarnation=1, state="starting")

    watch.check([NAME])


def test_one_that_dies_just_before_the_deadline_gets_the_time_to_come_back_and_to_load(run: RunDir) -> None:
    clock = Clock()
    supervised(run)
    config = LibraConfig()
    watch = patience(run, clock, config)
    register(run, NAME, heartbeat=7)
    clock.now_s += DEADLINE_S - 5.0
    watch.check([NAME])
    clock.now_s += 5.0
    watch.check([NAME])
    clock.now_s += absence_s(config) - 10.0
    register(run, NAME, heartbeat=1, incarnation=1, state="starting")
    watch.check([NAME])
    beat = 1
    for _ in range(int(load_s(config) / 9.0)):
        clock.now_s += 9.0
        beat += 1
        register(run, NAME, heartbeat=beat, incarnation=1, state="starting")
        watch.check([NAME])
    clock.now_s += 10.0
    register(run, NAME, heartbeat=beat + 1, incarnation=1, state="reloading")

    with pytest.raises(WaitTimeoutError):
        watch.check([NAME])


def test_one_that_never_comes_back_has_an_end_too(run: RunDir) -> None:
    clock = Clock()
    supervised(run)
    config = LibraConfig()
    watch = patience(run, clock, config)
    register(run, NAME, heartbeat=7)
    watch.check([NAME])
    clock.now_s += max(DEADLINE_S, absence_s(config)) + 1.0

    with pytest.raises(WaitTimeoutError):
        watch.check([NAME])


def test_an_instance_that_lives_and_does_not_answer_gets_no_more_time(run: RunDir) -> None:
    clock = Clock()
    supervised(run)
    watch = patience(run, clock)
    register(run, NAME, heartbeat=0)
    watch.check([NAME])
    for beat in range(1, int(DEADLINE_S)):
        clock.now_s += 1.0
        register(run, NAME, heartbeat=beat)
        watch.check([NAME])
    clock.now_s += 1.0
    register(run, NAME, heartbeat=int(DEADLINE_S))

    with pytest.raises(WaitTimeoutError):
        watch.check([NAME])


def test_an_instance_that_was_given_up_is_not_awaited(run: RunDir) -> None:
    clock = Clock()
    supervised(run)
    watch = patience(run, clock)
    write_given_up(replace(run, writer="supervisor"), {NAME: "its node failed"})

    watch.check(INSTANCES)

    assert [name for name in INSTANCES if watch.is_awaited(name)] == ["rollout_001"]


def test_registrations_are_not_read_more_often_than_needed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    looks: list[str] = []
    monkeypatch.setattr("stages.weights.patience.read_status", lambda run, name: looks.append(name))
    watch = patience(run, clock)
    for _ in range(1000):
        watch.check([NAME])
        clock.now_s += 0.01

    assert len(looks) <= 11


def test_what_waits_for_an_instance_knows_how_long_replacements_may_take() -> None:
    config = LibraConfig()

    assert replacements_s(config) == 3 * (absence_s(config) + load_s(config))
    config.rollout.max_replacements = 0
    assert replacements_s(config) == 0
    assert AWAY_BEATS * config.rollout.heartbeat_interval_s < config.rollout.heartbeat_timeout_s
