"""The dry run beside Python and Hydra: the benchmark measures all three, and finds no torch in the first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.dry_run import Import, imported_by, summary

PROJECT = Path(__file__).parents[2]


def test_a_dry_run_takes_longer_than_python_alone_and_imports_neither_torch_nor_vllm() -> None:
    command = [sys.executable, "-m", "benchmarks.dry_run", "--repeat", "1", "--json"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True, timeout=200)

    result = json.loads(done.stdout)

    dry_run, hydra_app, python = (case["median_s"] for case in result["cases"].values())
    assert dry_run > python
    assert hydra_app > python
    assert result["modules"] > 100
    assert result["heavy"] == []


def test_imports_are_those_of_the_interpreter_that_was_asked() -> None:
    modules = {found.module for found in imported_by(("-c", "import wave"))}

    assert "wave" in modules
    assert "hydra" not in modules


def test_torch_would_be_seen() -> None:
    measured = {"dry run": [1.0, 3.0, 2.0], "python": [0.5, 0.5, 0.5]}

    result = summary(measured, [Import("torch.nn", 0.5), Import("torch", 0.5), Import("json", 0.1)])

    assert result["heavy"] == ["torch"]
    assert result["imports_s"]["torch"] == 1.0
    assert result["cases"]["python"]["dry_run_is_times"] == 4.0
    assert not result["met"]
