"""Every stage is a command on a run directory; what is wrong with the directory is a sentence, not a stack trace."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from stages.rundir import RunDir

COMMANDS = ["trainer", "rollout", "controller", "weights", "checkpoint"]


@pytest.mark.parametrize("content", ['{"run_id": "x', "[]", '{"schema_version": 99}'], ids=["torn", "list", "layout"])
@pytest.mark.parametrize("stage", COMMANDS)
def test_a_damaged_run_is_refused_by_the_name_of_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str, content: str
) -> None:
    run = RunDir.create(tmp_path / "run")
    run.run_json.write_text(content)
    words = ["inspect"] if stage == "weights" else []
    monkeypatch.setattr(sys, "argv", [stage, *words, str(run.root)])

    assert importlib.import_module(f"stages.{stage}.__main__").main() != 0

    assert str(run.root) in capsys.readouterr().err
