"""The benchmark of deltas: its numbers are those of one step of AdamW on bf16 weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_versions_go_through_a_folder_both_ways(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.weights_delta", "--elements", "3e5", "--steps", "2", "--json"]
    done = subprocess.run(
        [*command, "--through", str(tmp_path)], cwd=PROJECT, capture_output=True, text=True, check=True, timeout=100
    )

    lines = [json.loads(line) for line in done.stdout.splitlines()]

    assert len(lines) == 2
    for line in lines:
        assert line["full_bytes"] > 600_000 > 5 * line["delta_bytes"]
        assert min(value for name, value in line.items() if name.endswith("_s")) > 0
    assert list(tmp_path.iterdir()) == []


def test_one_line_for_each_step_with_share_size_and_times() -> None:
    command = [sys.executable, "-m", "benchmarks.weights_delta", "--elements", "3e5", "--steps", "2", "--json"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True, timeout=100)

    lines = [json.loads(line) for line in done.stdout.splitlines()]

    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        assert line["full_bytes"] == 600_000
        assert 0.005 < line["changed_share"] < 0.1  # a step of 1e-6 beside weights of 0.02 with 8 bits of precision
        assert line["ratio"] > 5
        assert min(line["encode_s"], line["apply_s"], line["copy_s"]) > 0
