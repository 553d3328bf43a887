"""An optimizer whose state is in host memory takes the same steps as one on the GPU.

The GPU is pretended (tests/fake_gpu.py), megatron-core's optimizers are real: which elements are offloaded, that learning
rate, weight decay and clipping reach them, and what they compute. Times, memory and streams are for
tests/integration/test_trainer_gpu.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.offload_kit import FRACTIONS, LEARNING_RATES, WEIGHT_DECAY, cases, largest_difference, run_cases

DTYPES = ("float32", "bfloat16")
RANKS = (1, 2)
Results = dict[str, list[Any]]
"""By dtype: without offload, then with each of FRACTIONS."""


@pytest.fixture(scope="module", params=RANKS, ids=lambda ranks: f"dp{ranks}")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("offload")
    found = run_cases(root, "cpu", request.param, [case for dtype in DTYPES for case in cases(dtype)])
    size = 1 + len(FRACTIONS)
    return {dtype: found[index * size : (index + 1) * size] for index, dtype in enumerate(DTYPES)}


@pytest.mark.exercises("megatron_optimizer_cpu_offload")
@pytest.mark.parametrize("dtype", DTYPES)
def test_offloaded_steps_are_those_of_the_optimizer_on_the_gpu(results: Results, dtype: str) -> None:
    plain, *offloaded = results[dtype]
    tolerance = {"float32": 1e-5, "bfloat16": 2e-3}[dtype]  # one rounding to bfloat16 more or less

    for result in offloaded:
        assert result["losses"] == pytest.approx(plain["losses"], rel=tolerance)
        assert result["norms"] == pytest.approx(plain["norms"], rel=tolerance)
        assert largest_difference(result["weights"], plain["weights"]) < {"float32": 1e-5, "bfloat16": 1e-2}[dtype]


@pytest.mark.exercises("megatron_optimizer_offload_fraction")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fraction_of_the_elements_goes_to_the_host(results: Results, dtype: str) -> None:
    nothing, half, everything = (result["state"] for result in results[dtype][1:])

    assert nothing["offloaded"] == 0
    assert 0.5 <= half["offloaded"] / half["elements"] < 0.8  # parameters are offloaded whole
    assert everything["offloaded"] == everything["elements"]
    assert all(place["offloaded_moments"] == place["offloaded"] for place in (nothing, half, everything))


@pytest.mark.parametrize("dtype", DTYPES)
def test_learning_rate_and_weight_decay_reach_the_optimizers_of_both_sides(results: Results, dtype: str) -> None:
    for result in results[dtype]:
        assert result["state"]["learning_rates"] == [LEARNING_RATES[-1]]
        assert result["state"]["weight_decays"] == [0.0, WEIGHT_DECAY]


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_are_float32_and_pinned_on_the_host(results: Results, dtype: str) -> None:
    for result in results[dtype]:
        assert result["state"]["dtypes"] == ["torch.float32"]
        assert result["state"]["pinned"]


def test_only_this_ranks_shard_is_ever_pinned(results: Results) -> None:
    everything = results["float32"][-1]

    assert everything["pinned_built_bytes"] == 4 * everything["state"]["elements"]
