"""On a real GPU: options that decide in which memory weights and optimizer state are.

Small models only, no vLLM. `python -m pytest -s tests/integration/test_trainer_gpu.py` prints what each case held on the GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.offload_kit import FRACTIONS, cases, largest_difference, run_cases

pytestmark = pytest.mark.gpu

HIDDEN = 512
"""Four million parameters: their state outweighs what the allocator rounds up."""
LEARNING_RATES = (1e-3, 5e-4, 2e-4)
"""Small: at 1e-2 the third step of this model already multiplies rounding differences a thousand times."""
DTYPES = ("float32", "bfloat16")
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
"""Relative: kernels of host and GPU round differently, and so do the steps that follow."""
STATE_BYTES = {"float32": 8, "bfloat16": 12}
"""Per parameter, of what can be offloaded: Adam's two moments, and for bfloat16 the float32 masters."""


def run_on(tmp_path_factory: pytest.TempPathFactory, ranks: int, wanted: list[dict[str, Any]]) -> list[Any]:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs needed, {torch.cuda.device_count()} found")
    return run_cases(tmp_path_factory.mktemp("gpu"), "cuda", ranks, wanted, HIDDEN, LEARNING_RATES)


@pytest.fixture(scope="module", params=(1, 2), ids=lambda ranks: f"dp{ranks}")
def offloaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By dtype: without offload, then with each of FRACTIONS."""
    found = run_on(tmp_path_factory, request.param, [case for dtype in DTYPES for case in cases(dtype)])
    size = 1 + len(FRACTIONS)
    by_dtype = {dtype: found[index * size : (index + 1) * size] for index, dtype in enumerate(DTYPES)}
    for dtype, results in by_dtype.items():
        for name, result in zip(("none", *FRACTIONS), results, strict=True):
            held, peak = result["held_bytes"] / 1e6, result["peak_bytes"] / 1e6
            print(f"dp{request.param} {dtype} offload {name}: {held:.1f} MB held, {peak:.1f} MB peak")
    return by_dtype


@pytest.mark.exercises("megatron_optimizer_cpu_offload")
@pytest.mark.parametrize("dtype", DTYPES)
def test_offloaded_steps_are_those_of_the_optimizer_on_the_gpu(offloaded: dict[str, list[Any]], dtype: str) -> None:
    plain, *others = offloaded[dtype]
    tolerance = TOLERANCE[dtype]

    for result in others:
        assert result["losses"] == pytest.approx(plain["losses"], rel=tolerance)
        assert result["norms"] == pytest.approx(plain["norms"], rel=tolerance)
        assert largest_difference(result["weights"], plain["weights"]) < {"float32": 1e-4, "bfloat16": 2e-2}[dtype]


@pytest.mark.exercises("megatron_optimizer_offload_fraction")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_holds_less_by_what_was_offloaded(offloaded: dict[str, list[Any]], dtype: str) -> None:
    plain, *others = offloaded[dtype]

    for result in others:
        state_bytes = STATE_BYTES[dtype] * result["state"]["offloaded"]
        saved_bytes = plain["held_bytes"] - result["held_bytes"]
        assert saved_bytes == pytest.approx(state_bytes, abs=0.05 * STATE_BYTES[dtype] * result["state"]["elements"])
        assert result["state"]["pinned"]


@pytest.mark.exercises("megatron_use_cpu_initialization")
def test_a_model_built_in_host_memory_takes_the_same_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    switches = [{"train_dtype": "float32", "megatron_use_cpu_initialization": on_host} for on_host in (False, True)]

    on_gpu, on_host = run_on(tmp_path_factory, 1, switches)

    assert on_host["losses"] == pytest.approx(on_gpu["losses"], rel=1e-5)
    assert largest_difference(on_host["weights"], on_gpu["weights"]) < 1e-5
