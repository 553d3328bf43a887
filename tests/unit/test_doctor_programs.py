"""The two programs of the doctor that need torch: what they compare and compute, without a server and without a network."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from launch.compose import compose
from launch.doctor.inside import engine
from launch.doctor.inside.collective import Ring
from launch.doctor.probes.collective import NETWORK, NODE
from launch.prepare import prepare


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_made_model_can_be_run_on_both_devices(tmp_path: Path, device: str) -> None:
    overrides = engine.overrides(device, 100.0)
    engine.save(engine.make_model(compose(overrides), 0), compose(overrides), tmp_path / "model")

    prepared = prepare([*overrides, f"model_path={tmp_path / 'model'}", f"launch.run_dir={tmp_path / 'run'}"])

    assert prepared.config.hardware.device == device
    assert prepared.config.rollout.ready_timeout_s == 100.0
    assert [instance.name for instance in prepared.plan.rollout.instances] == [engine.INSTANCE]
    assert json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"] is False


def test_models_of_different_seeds_are_different() -> None:
    config = compose(engine.overrides("cpu", 100.0))
    one, other = (engine.make_model(config, seed).state_dict() for seed in (0, 1))

    assert not any(bool((one[name] == other[name]).all()) for name in one if one[name].ndim == 2)


ANSWER = [([4, 5, 6], [-1.0, -2.0, -3.0]), ([7, 8], [-0.5, -0.25])]


def test_equal_answers_do_not_differ() -> None:
    assert engine.difference(ANSWER, ANSWER) == 0.0


def test_the_largest_difference_of_a_log_prob_counts() -> None:
    other = [([4, 5, 6], [-1.0, -2.25, -3.0]), ([7, 8], [-0.5, -0.25])]

    assert engine.difference(ANSWER, other) == 0.25


def test_behind_a_token_that_differs_nothing_is_compared() -> None:
    other = [([4, 5, 9], [-1.0, -2.0, -9.0]), ([7, 8], [-0.5, -0.25])]

    assert engine.difference(ANSWER, other) == 0.0


def test_answers_that_have_too_little_in_common_differ_without_bound() -> None:
    other = [([9, 5, 6], [-1.0, -2.0, -3.0]), ([9, 8], [-0.5, -0.25])]

    assert engine.difference(ANSWER, other) == math.inf


def test_a_log_prob_that_is_no_number_is_not_overlooked() -> None:
    other = [([4, 5, 6], [-1.0, math.nan, -3.0]), ([7, 8], [-0.5, -0.25])]

    assert math.isnan(engine.difference(ANSWER, other))


def test_ranks_meet_inside_their_node_and_across_at_equal_places() -> None:
    assert Ring("nccl", 0, 4, 2).members() == {NODE: [[0, 1], [2, 3]], NETWORK: [[0, 2], [1, 3]]}


def test_kinds_of_a_single_rank_are_left_out() -> None:
    assert Ring("gloo", 0, 3, 1).members() == {NETWORK: [[0, 1, 2]]}
    assert Ring("nccl", 0, 8, 8).members() == {NODE: [list(range(8))]}
