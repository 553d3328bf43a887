"""The benchmark of the launcher: its arithmetic."""

from __future__ import annotations

import pytest

from benchmarks.launch import LIBRA, PYTHON, SHELL, SUBMITIT, Times, summary, table

MEASURED = {
    SHELL: [Times(0.01, 0.2)],
    PYTHON: [Times(0.02, 1.0), Times(0.04, 3.0), Times(0.03, 2.0)],
    SUBMITIT: [Times(0.02, 2.5)],
    LIBRA: [Times(1.0, 2.5), Times(3.0, 4.0), Times(1.5, 3.0)],
}


def test_what_is_added_is_the_difference_to_what_runs_without_libra() -> None:
    found = summary(MEASURED)

    assert found["added"][SUBMITIT]["started_s"] == pytest.approx(0.5)
    assert found["added"][PYTHON] == {
        "accepted_s": pytest.approx(1.47),
        "started_s": pytest.approx(1.0),
        "least_accepted_s": pytest.approx(0.98),
        "least_started_s": pytest.approx(1.5),
    }
    assert found["met"]
    assert [one["accepted_s"] for one in found["cases"][LIBRA]["all"]] == [1.0, 3.0, 1.5], "every run is kept"


def test_two_seconds_more_in_either_way_miss_the_target() -> None:
    late = {**MEASURED, LIBRA: [Times(1.0, 4.1)]}
    slow = {**MEASURED, LIBRA: [Times(2.1, 2.0)]}

    assert not summary(late)["met"]
    assert not summary(slow)["met"]


def test_the_table_has_a_row_for_each_size() -> None:
    results = [
        {"slurm": "22.05.8", "nodes": nodes, "steps": 3, "tasks": 3, "load_average": 1.25, "first": {"accepted_s": 2}}
        | summary(MEASURED)
        for nodes in (2, 16)
    ]

    lines = table(results).splitlines()

    assert lines[0].startswith("Slurm 22.05.8, Python")
    assert lines[4:6] == [
        f"| {nodes} | 3 | 3 | 1.2 | 0.03 (0.02) | 1.50 (1.00) | 1.47 (0.98) |"
        " 0.20 (0.20) | 2.00 (1.00) | 2.50 (2.50) | 3.00 (2.50) | 1.00 (1.50) | 0.50 (0.00) |"
        for nodes in (2, 16)
    ]
    assert "accepted after 2.00, 2.00 s" in lines[-3]
    assert lines[-1].endswith("each way: met")
