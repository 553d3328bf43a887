"""How long a refresh may take, from what earlier ones took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from planner.plan import InstancePlacement, Plan
from stages.rundir import RunDir
from stages.weights.deadlines import (
    ASSUMED_BYTES_PER_S,
    FORGETTING,
    SLACK,
    Before,
    read_before,
    refresh_deadline_s,
    slowest_bytes_per_s,
    start_s,
)
from stages.weights.refresh import request_refresh
from tests.weights_kit import INSTANCES, Answers, as_writer, make_context, publish_full, register

GB = 10**9


@pytest.fixture
def config() -> LibraConfig:
    config = LibraConfig(rollout_weight_reload_method="inplace", rollout_weight_reload_strategy="parallel")
    config.weights.refresh_timeout_s, config.weights.refresh_floor_s = 600.0, 20.0
    return config


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Three instances on node 0 of component 1, one on its node 1."""
    plan = make_context(RunDir.create(tmp_path / "plan")).plan
    places = (0, 0, 0, 1)
    instances = tuple(InstancePlacement(f"rollout_{number:03d}", 1, 1, node) for number, node in enumerate(places))
    return replace(plan, rollout=replace(plan.rollout, instances=instances))


@pytest.mark.exercises("weights.refresh_floor_s")
def test_nothing_gets_less_than_the_floor(config: LibraConfig, plan: Plan) -> None:
    assert refresh_deadline_s(config, plan, GB, 100 * GB, is_starting=False) == 20.0


@pytest.mark.exercises("weights.refresh_timeout_s")
def test_nothing_gets_more_than_the_limit(config: LibraConfig, plan: Plan) -> None:
    assert refresh_deadline_s(config, plan, 10**15, GB, is_starting=False) == 600.0


def test_the_limit_rules_a_floor_above_it(config: LibraConfig, plan: Plan) -> None:
    config.weights.refresh_floor_s = 900.0

    assert refresh_deadline_s(config, plan, GB, GB, is_starting=False) == 600.0


def test_a_measured_rate_counts_with_slack(config: LibraConfig, plan: Plan) -> None:
    assert refresh_deadline_s(config, plan, 30 * GB, GB, is_starting=False) == SLACK * 30


def test_before_anything_was_measured_a_slow_disk_is_assumed(config: LibraConfig, plan: Plan) -> None:
    assert refresh_deadline_s(config, plan, GB, None, is_starting=False) == SLACK * GB / ASSUMED_BYTES_PER_S


def test_instances_that_take_turns_get_the_time_of_all_on_the_fullest_node(config: LibraConfig, plan: Plan) -> None:
    config.rollout_weight_reload_strategy = "serial"

    assert refresh_deadline_s(config, plan, 20 * GB, GB, is_starting=False) == 3 * SLACK * 20


def test_servers_that_have_yet_to_start_get_the_time_to_start(config: LibraConfig, plan: Plan) -> None:
    assert refresh_deadline_s(config, plan, GB, 100 * GB, is_starting=True) == 20.0 + start_s(config)


def test_a_restart_may_take_as_long_as_a_start_until_it_was_measured(config: LibraConfig, plan: Plan) -> None:
    config.rollout_weight_reload_method = "restart"

    assert refresh_deadline_s(config, plan, GB, None, is_starting=False) == start_s(config) + SLACK * 10
    assert refresh_deadline_s(config, plan, GB, GB / 60, is_starting=False) == SLACK * 60


def test_the_slowest_instance_sets_the_rate_and_its_wait_for_the_lock_does_not_count(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    answers = Answers(run, publish_full(run, 1))
    fast, slow = answers.loaded("rollout_000", 1.0), replace(answers.loaded("rollout_001", 9.0), lock_wait_s=5.0)

    assert slowest_bytes_per_s([fast, slow], 1000, None) == 250.0


def test_a_slow_moment_is_forgotten_bit_by_bit(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    fast = Answers(run, publish_full(run, 1)).loaded("rollout_000", 1.0)

    assert slowest_bytes_per_s([fast], 1000, 10.0) == FORGETTING * 10.0
    assert slowest_bytes_per_s([fast], 1000, 5000.0) == 1000.0


def test_the_next_refresh_gets_its_deadline_from_the_one_before_also_across_attempts(tmp_path: Path) -> None:
    run = as_writer(RunDir.create(tmp_path / "run"), "trainer")
    context = make_context(run)
    context.config.weights.refresh_timeout_s, context.config.weights.refresh_floor_s = 600.0, 1.0
    for version in (1, 2):
        answers = Answers(context.run, publish_full(context.run, version))
        for name in INSTANCES:
            register(context.run, name)
            answers.write(name, total_reload_s=2.0 * version)
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)
        context.run.start_attempt(version)
        context.run = RunDir.open(run.root, writer="trainer")

    request = context.run.read(run.request_json(2), any_attempt=True)
    assert request is not None
    assert request["deadline_s"] == pytest.approx(SLACK * 2.0)
    assert read_before(context.run, context.config, 3).slowest_bytes_per_s == answers.manifest.weight_bytes / 4.0


def test_a_refresh_with_the_other_method_measured_something_else(tmp_path: Path) -> None:
    run = as_writer(RunDir.create(tmp_path / "run"), "trainer")
    record = {"version": 1, "method": "restart", "slowest_bytes_per_s": 5.0, "quarantined": {"rollout_001": "late"}}
    run.write(run.refreshed_json(1), record)

    before = read_before(run, make_context(run).config, 2)

    assert before == Before(1, None, ("rollout_001",))
