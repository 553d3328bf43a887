"""On a real GPU: what is restored is what was saved, wherever masters and moments live.

Small models only, no vLLM: `python -m pytest tests/integration/test_checkpoint_gpu.py`. Later steps are compared within rounding,
because some kernels add in any order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.checkpoint_kit import SAVED_AT, Case, run_cases

pytestmark = pytest.mark.gpu

OFFLOADS = (None, 0.5, 1.0)
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=(1, 2), ids=lambda ranks: f"dp{ranks}")
def all_found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[Case, int], dict[str, Any]]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"{request.param} GPUs needed, {torch.cuda.device_count()} found")
    cases = [Case(1, request.param, dtype, offload, "cuda") for dtype in DTYPES for offload in OFFLOADS]
    return run_cases(tmp_path_factory.mktemp("gpu"), cases)


def test_parameters_masters_and_moments_are_restored_bit_for_bit(
    all_found: dict[tuple[Case, int], dict[str, Any]],
) -> None:
    for (case, rank), found in all_found.items():
        assert found["resumed_at"] == SAVED_AT
        assert found["restored"] == [], (case, rank)
        assert found["draws"][0] == found["draws"][1], (case, rank)


def test_steps_after_a_resume_are_those_of_a_run_that_went_on(
    all_found: dict[tuple[Case, int], dict[str, Any]],
) -> None:
    for (case, _), found in all_found.items():
        tolerance = {"float32": 1e-4, "bfloat16": 2e-2}[case.dtype]
        for straight, resumed in zip(*found["results"], strict=True):
            for name in ("loss", "grad_norm"):
                assert resumed[name] == pytest.approx(straight[name], rel=tolerance, abs=tolerance), case
            assert resumed["learning_rate"] == straight["learning_rate"]
        assert found["probes"][1] == pytest.approx(found["probes"][0], abs=tolerance), case
