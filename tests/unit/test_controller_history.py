"""What metrics.jsonl still says after attempts that were cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.controller.history import read_history
from stages.controller.metrics import MetricsFile


def write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_step_that_was_trained_again_counts_once_with_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        {"event": "evaluation", "when": "before", "greedy_reward": 0.25},
        {"step": 0, "reward": 0.1},
        {"step": 1, "reward": 0.2},
        {"step": 2, "reward": 0.3},
        {"event": "resumed", "attempt": 1, "from_step": 1},
        {"step": 1, "reward": 0.4},
        {"event": "evaluation", "when": "after", "greedy_reward": 0.5},
    )

    history = read_history(path)

    assert [(step, line["reward"]) for step, line in history.steps.items()] == [(0, 0.1), (1, 0.4)]
    assert (history.num_reported, history.left_behind) == (2, 2)
    assert history.before is not None
    assert history.before["greedy_reward"] == 0.25


def test_steps_behind_a_gap_are_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 0}, {"step": 2})

    assert read_history(path).num_reported == 1


def test_a_run_that_wrote_nothing_has_no_history(tmp_path: Path) -> None:
    history = read_history(tmp_path / "metrics.jsonl")

    assert (history.steps, history.before, history.num_reported) == ({}, None, 0)


def test_half_a_line_of_a_killed_writer_is_taken_away_before_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "rew')
    assert sorted(read_history(path).steps) == [0]

    with MetricsFile(path) as metrics:
        metrics.write({"step": 1})

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


def test_a_line_that_is_no_record_is_named_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnonsense\n{"step": 1}\n')

    assert sorted(read_history(path).steps) == [0, 1]
    assert "metrics.jsonl line 2 is no record" in capsys.readouterr().out
