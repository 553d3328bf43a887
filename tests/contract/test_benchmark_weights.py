"""The benchmark of publishing and preparing: what it prints, and that its copies are copies."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from benchmarks.weights_model import QWEN_7B, shape_of_bytes
from benchmarks.weights_rivals import Pieces

PROJECT = Path(__file__).parents[2]


def test_one_run_measures_publish_prepare_and_their_rivals(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.weights",
        "--gigabytes",
        "0.01",
        "--repeat",
        "1",
        "--json",
        "--no-engine",
    ]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--threads", "2"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )

    result = json.loads(done.stdout)

    assert 5e6 < result["bytes"] < 20e6
    assert result["threads"] == 2
    assert math.isclose(result["publish_ratio"], result["publish_s"] / result["copy_s"], rel_tol=0.1)
    assert math.isclose(result["prepare_ratio"], result["prepare_s"] / result["copy_s"], rel_tol=0.1)
    assert 0 < result["snapshot_s"] < result["publish_s"]
    assert result["staging"] == "shared"
    assert result["peak_extra_host_bytes"] > 0
    assert "paused_s" not in result
    assert all(result[name] > 0 for name in result if name.endswith("_s"))
    assert list(tmp_path.iterdir()) == []


def test_a_copy_has_the_same_bytes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "large").write_bytes(bytes(range(256)) * 5000 + b"end")
    (source / "small").write_bytes(b"x")
    pieces = Pieces(source, threads=3)

    pieces.copy(source, target, durable=True)

    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }


def test_what_is_written_from_memory_is_what_was_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(bytes(range(251)) * 9000)
    (source / "b").write_bytes(b"second")
    pieces = Pieces(source, threads=2)

    pieces.write(tmp_path / "target", durable=False)

    assert (tmp_path / "target" / "a").read_bytes() == (source / "a").read_bytes()
    assert (tmp_path / "target" / "b").read_bytes() == b"second"


def test_the_7b_shape_has_the_published_number_of_parameters() -> None:
    assert QWEN_7B.parameters == 7_615_616_512


def test_a_made_up_model_is_about_as_large_as_asked() -> None:
    for wanted in (1e7, 1e8, 1.5e9):
        found = shape_of_bytes(wanted, 2).parameters * 2
        assert math.isclose(found, wanted, rel_tol=0.5)
