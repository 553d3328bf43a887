"""`python -m planner`: the plan of a run, or one sentence about what is in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.prepare import prepare
from planner.__main__ import main
from planner.describe import describe
from stages.files import write_json_atomic


def test_the_plan_of_a_run_reads_as_it_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = prepare(["+experiment=grpo_7b"]).plan
    write_json_atomic(tmp_path / "plan.json", plan.to_dict())

    assert main([str(tmp_path)]) == 0
    # Terms of a sum are in the order of their names in the file.
    assert sorted(capsys.readouterr().out) == sorted(f"{describe(plan)}\n")


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"{", "is not JSON"),
        (b"[]", "wanted a JSON object"),
        (b"\xff", "is not text"),
        (b"{}", "is no plan of this release (KeyError: "),
        (b'{"layout": "single", "rollout": {}, "alternative": 1}', "is no plan of this release"),
    ],
)
def test_what_is_no_plan_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, wanted: str
) -> None:
    (tmp_path / "plan.json").write_bytes(content)

    assert main([str(tmp_path)]) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert f"{tmp_path}/plan.json" in said.err
    assert wanted in said.err


@pytest.mark.parametrize("place", ["nowhere", "/dev/null", "a" * 5000])
def test_a_place_without_a_plan_is_named(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([place]) == 2

    assert "usage: python -m planner RUN" in capsys.readouterr().err
