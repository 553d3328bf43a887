"""The end of a log, whatever stands in its place."""

from __future__ import annotations

from pathlib import Path

from launch.steps import tail


def test_the_last_lines_are_given(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\ntwo\nthree\n")

    assert tail(tmp_path / "log", lines=2) == ["two", "three"]


def test_no_log_is_no_lines(tmp_path: Path) -> None:
    assert tail(tmp_path / "log") == []


def test_a_log_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder was")
    (tmp_path / "folder").mkdir()

    for path in (tmp_path / "logs" / "log", tmp_path / "folder"):
        (line,) = tail(path)
        assert line.startswith(f"cannot read {path}: ")
