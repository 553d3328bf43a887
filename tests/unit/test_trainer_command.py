"""`python -m stages.trainer`: mistakes of the caller end with status 2 and one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.trainer.__main__ import main


def test_a_directory_without_a_run_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--replay", "step_000003"]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["run", "--replay", "banana"], ["run", "--replay", "v000003"], ["run", "--weights", "v000003"], []],
)
def test_arguments_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == 2
