"""The benchmark of refreshes with a real vLLM, on whatever is here: every row gives numbers, and a row that fails is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
pytestmark = pytest.mark.vllm


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_every_row_is_measured_beside_the_others(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.weights_gpu", "--device", "cpu", "--repeat", "1"]
    done = subprocess.run(
        [*command, "--folders", str(tmp_path)], cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False
    )

    lines = lines_of(done.stdout)

    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line["medians"]["row"]: line["medians"] for line in lines if "medians" in line}
    assert rows.keys() == {"inplace", "idle", "vllm_reload", "restart"}
    assert all(0 < row["snapshot_s"] <= row["publish_s"] < row["total_s"] for row in rows.values())
    assert all(0 < row["paused_s"] < row["total_s"] for row in rows.values())
    assert {"span.reset_prefix_cache", "span.prove_weights", "swap_s"} <= rows["inplace"]["server"].keys()
    busy = [
        line["requests_in_flight"] for line in lines if line.get("row") == "inplace" and line.get("warm_up") is False
    ]
    assert busy == [2]
    assert list(tmp_path.iterdir()) == []


def test_what_fails_is_told_and_ends_with_an_error(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.weights_gpu",
        "--device",
        "cpu",
        "--rows",
        "inplace",
        "--budget-s",
        "1",
    ]
    done = subprocess.run(
        [*command, "--folders", str(tmp_path)], cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False
    )

    lines = lines_of(done.stdout)

    assert done.returncode == 1
    assert {"failed": f"warm-up in {tmp_path}"} in lines
    assert "---- end of " in done.stdout
    assert [line["skipped"] for line in lines if "skipped" in line] == ["inplace"]
    assert list(tmp_path.iterdir()) == []


def test_the_benchmark_on_a_cpu_measures_a_pause_too(tmp_path: Path) -> None:
    sizes = ["--gigabytes", "0.01", "--engine-gigabytes", "0.001", "--repeat", "1"]
    command = [sys.executable, "-m", "benchmarks.weights", *sizes, "--json", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=400, check=False)

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert 0 < result["engine_bytes"] < result["bytes"]
    assert 0 < result["paused_s"] <= result["paused_worst_s"]
    assert result["engine_requests_failed"] == 0
    assert {"publish_ratio", "prepare_ratio", "peak_extra_host_bytes"} <= result.keys()
    assert list(tmp_path.iterdir()) == []
