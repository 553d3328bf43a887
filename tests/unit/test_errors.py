"""What the user reads when something is wrong."""

from __future__ import annotations

from launch.errors import LONGEST_LINE, ConfigError, readable


def test_what_a_value_holds_cannot_move_the_cursor() -> None:
    assert readable("seed=\x1b[31m\u202e\x7fé: wanted") == "seed=\\x1b[31m\\u202e\\x7fé: wanted"


def test_a_long_value_leaves_the_option_and_what_is_wanted() -> None:
    said = readable(f"seed={'9' * 100_000}: wanted a whole number (seed)")

    assert len(said) <= LONGEST_LINE
    assert said.startswith("seed=999")
    assert said.endswith("999: wanted a whole number (seed)")


def test_reasons_in_lines_of_their_own_keep_them() -> None:
    assert str(ConfigError(["cannot be divided:\n    first\n    second"])).endswith(
        "\n  - cannot be divided:\n    first\n    second"
    )


def test_the_problems_themselves_stay_as_they_are() -> None:
    assert ConfigError(["a\tb"]).problems == ("a\tb",)
