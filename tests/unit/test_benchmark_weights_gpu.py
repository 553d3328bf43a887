"""The parts of the benchmark of refreshes that need no engine: time limits, medians, and the model that answers the probe."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.weights_gpu.disk import _MEMINFO, _WAITING, Interval, dirty_bytes
from benchmarks.weights_gpu.limits import TooSlowError, limited
from benchmarks.weights_gpu.model import SHAPES, Parameters
from benchmarks.weights_gpu.report import Table
from stages.weights.proof import probe_change_nats


def sleep_long() -> None:
    time.sleep(30.0)


def test_a_wait_ends_at_its_limit() -> None:
    with pytest.raises(TooSlowError, match=r"^a nap took longer"), limited(0.01, "a nap"):
        sleep_long()


@pytest.mark.parametrize("outer_s, inner_s, slow", [(0.05, 10.0, "outer"), (10.0, 0.05, "inner")])
def test_of_nested_limits_the_tightest_holds(outer_s: float, inner_s: float, slow: str) -> None:
    with pytest.raises(TooSlowError, match=f"^{slow}"), limited(outer_s, "outer"), limited(inner_s, "inner"):
        sleep_long()


@pytest.mark.parametrize("inner_s", [0.01, 10.0])
def test_a_limit_goes_on_behind_one_within_it(inner_s: float) -> None:
    def sleep_behind_the_inner() -> None:
        with limited(inner_s, "inner"):
            pass
        sleep_long()

    with pytest.raises(TooSlowError, match=r"^outer"), limited(0.05, "outer"):
        sleep_behind_the_inner()


def measured(total_s: float, swap_s: float) -> dict[str, Any]:
    return {"paused_s": 1.0, "total_s": total_s, "server": {"swap_s": swap_s}, "server_says": {}}


def test_medians_leave_warm_ups_out(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    table.add("inplace", "/x", measured(99.0, 99.0), warm_up=True)
    for total_s, swap_s in ((3.0, 0.3), (1.0, 0.1), (2.0, 0.2)):
        table.add("inplace", "/x", measured(total_s, swap_s), warm_up=False)

    (record,) = table.medians()

    assert (record["refreshes"], record["total_s"], record["total_worst_s"]) == (3, 2.0, 3.0)
    assert record["server"] == {"swap_s": 0.2}
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["warm_up"] for line in lines] == [True, False, False, False]


def naps_between_refreshes(interval: Interval, clock: list[float], work_s: float) -> None:
    """Three refreshes that take a second each, with `work_s` of other work behind each."""
    for _ in range(3):
        interval.begin()
        clock[0] += 1.0
        interval.end()
        clock[0] += work_s


@pytest.mark.parametrize(
    ("in_memory", "work_s", "naps"),
    [(False, 0.0, [0.0, 5.0, 5.0]), (False, 2.0, [0.0, 3.0, 3.0]), (False, 9.0, [0.0] * 3), (True, 0.0, [0.0] * 3)],
)
def test_a_disk_gets_its_time_from_the_end_of_one_refresh_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool, work_s: float, naps: list[float]
) -> None:
    monkeypatch.setattr("benchmarks.weights_gpu.disk.lies_in_memory", lambda _: in_memory)
    slept: list[float] = []
    clock = [100.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    naps_between_refreshes(Interval(tmp_path, 5.0, lambda: clock[0], sleep), clock, work_s)

    assert slept == naps


@pytest.mark.parametrize(("in_memory", "facts"), [(False, {"dirty_bytes": 7168}), (True, {})])
def test_what_a_disk_has_yet_to_take_is_told_with_a_refresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool, facts: dict[str, int]
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree: 9 kB\nDirty:                 4 kB\nWriteback:      3 kB\nWritebackTmp:   8 kB\n")
    monkeypatch.setattr("benchmarks.weights_gpu.disk.lies_in_memory", lambda _: in_memory)
    monkeypatch.setattr("benchmarks.weights_gpu.disk.dirty_bytes", lambda: dirty_bytes(meminfo))

    assert Interval(tmp_path, 0.0).begin() == facts


def test_this_host_says_both_what_is_dirty_and_what_is_on_its_way() -> None:
    assert len(_WAITING.findall(_MEMINFO.read_text())) == 2


def test_the_probe_is_that_of_the_published_tensors_and_a_step_moves_it_far() -> None:
    shape = SHAPES["tiny"]
    parameters = Parameters(shape, "float32", torch.device("cpu"), probe_tokens=12)
    before = parameters.probe()
    parameters.step()
    after = parameters.probe()

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape.config("float32")))
    model.load_state_dict({local.name: local.tensor for local in parameters.tensors()})
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([after.token_ids])).logits[0, :-1], dim=-1)
    wanted = [float(row[token]) for row, token in zip(scores, after.token_ids[1:], strict=True)]

    assert probe_change_nats(replace(after, logprobs=tuple(wanted)), after) < 1e-5
    assert probe_change_nats(before, after) > 0.05
