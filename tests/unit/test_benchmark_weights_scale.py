"""The benchmark of refreshes with many instances: what it counts, and when it is not content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.weights_scale import Row, is_linear, looks, main, measured

ROW = Row(10, 3, 0.1, 40, 9, 20.0, 5.0)


def test_operations_of_one_instance_do_not_depend_on_how_many_there_are(tmp_path: Path) -> None:
    few, more = measured(3, 2, tmp_path), measured(9, 2, tmp_path)

    assert few.instance_operations == more.instance_operations > 10
    assert (few.nodes, more.nodes) == (2, 5)
    each = (more.trainer_operations - few.trainer_operations) / 6
    assert 3 <= each <= 6  # registration, prepared, loaded


def test_more_operations_for_each_instance_are_not_linear() -> None:
    assert is_linear([ROW, replace(ROW, instances=20, trainer_operations=80)])
    assert not is_linear([ROW, replace(ROW, instances=20, trainer_operations=160)])


def test_the_trainer_looks_less_and_less_often() -> None:
    assert looks(1) > looks(60) / 20


def test_the_table_has_a_row_for_each_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--instances", "4", "2", "--folder", str(tmp_path)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["2", "4"]
    assert not list(tmp_path.iterdir())
