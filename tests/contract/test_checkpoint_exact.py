"""Four steps are two steps, a checkpoint and two steps, bit for bit, in every layout of ranks and both number formats.

The GPU of the offloaded cases is pretended (tests/fake_gpu.py); megatron-core's optimizers are real.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import LlamaForCausalLM

from conf.schema import LibraConfig
from launch.machine import checkpoint_bytes
from planner.architecture import Architecture
from tests.checkpoint_kit import MODEL, SAVED_AT, Case, run_cases

DTYPES = ("float32", "bfloat16")
CASES = [Case(tp, dp, dtype) for tp, dp in ((1, 1), (1, 2), (2, 1)) for dtype in DTYPES]
CASES += [Case(1, 2, dtype, fraction) for dtype in DTYPES for fraction in (0.5, 1.0)]
RANKS = [(case, rank) for case in CASES for rank in range(case.ranks)]
CHANGES = [("bfloat16", None, 1.0), ("bfloat16", 1.0, 0.5), ("float32", 0.5, None)]
CHANGED = [Case(1, 2, dtype, before, changes=True, resumed_offload=after) for dtype, before, after in CHANGES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exact")


@pytest.fixture(scope="module")
def all_found(folder: Path) -> dict[tuple[Case, int], dict[str, Any]]:
    return run_cases(folder, [*CASES, *CHANGED])


@pytest.fixture(params=RANKS, ids=lambda place: f"{place[0].name}_rank{place[1]}")
def found(request: pytest.FixtureRequest, all_found: dict[tuple[Case, int], dict[str, Any]]) -> dict[str, Any]:
    return {**all_found[request.param], "case": request.param[0]}


def test_weights_masters_and_moments_are_the_same_bit_for_bit(found: dict[str, Any]) -> None:
    assert found["resumed_at"] == SAVED_AT
    assert found["restored"] == []
    assert found["differences"] == []


@pytest.mark.parametrize("case", CHANGED, ids=lambda case: case.name)
def test_a_run_goes_on_with_its_optimizer_in_other_memory(
    all_found: dict[tuple[Case, int], dict[str, Any]], case: Case
) -> None:
    for rank in range(case.ranks):
        found = all_found[case, rank]
        assert found["restored"] == []
        straight, resumed = found["results"]
        for before, after in zip(straight, resumed, strict=True):
            assert after["loss"] == pytest.approx(before["loss"], rel=1e-2, abs=1e-4)


def test_the_comparison_covers_what_training_changes(found: dict[str, Any]) -> None:
    kinds = {name.split(".")[0] for name in found["changed"]}
    masters = {"master"} if found["case"].dtype == "bfloat16" else set()

    assert kinds == {"whole", "param", "exp_avg", "exp_avg_sq", "adam"} | masters


def test_loss_gradient_norm_and_learning_rate_go_on_the_same(found: dict[str, Any]) -> None:
    straight, resumed = found["results"]

    assert resumed == straight
    assert len({result["learning_rate"] for result in straight}) == len(straight) > 1


def test_the_launcher_s_check_of_free_space_knows_the_size(found: dict[str, Any], folder: Path) -> None:
    case = found["case"]
    files = (folder / case.name / "checkpoints" / f"step_{SAVED_AT:06d}").glob("rank_*.safetensors")
    config = LibraConfig(train_dtype=case.dtype)
    parameters = sum(parameter.numel() for parameter in LlamaForCausalLM.from_pretrained(folder / MODEL).parameters())

    predicted = checkpoint_bytes(config, cast(Architecture, SimpleNamespace(parameters=parameters)))

    # Random states and the heads of the files come on top; of a small model they are a good part.
    overhead = case.ranks * 20_000
    assert predicted <= sum(file.stat().st_size for file in files) <= 1.05 * predicted + overhead


def test_the_probe_of_the_weights_is_the_same(found: dict[str, Any]) -> None:
    straight, resumed = found["probes"]

    assert resumed == straight


def test_random_numbers_go_on_where_they_were_saved(found: dict[str, Any]) -> None:
    drawn, redrawn = found["draws"]

    assert redrawn == drawn
