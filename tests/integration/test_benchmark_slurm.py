"""The benchmark of the launcher, once on a small real Slurm of its own."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks.launch import measure


@pytest.mark.slurm
def test_all_three_ways_start_every_task() -> None:
    before = os.environ.get("SLURM_CONF")

    found = measure(nodes=2, repeat=1)

    assert (found["steps"], found["tasks"]) == (3, 3)
    assert all(len(case["all"]) == 1 and case["started_s"] > 0 for case in found["cases"].values())
    assert json.loads(json.dumps(found)) == found
    assert os.environ.get("SLURM_CONF") == before
