"""What a user did wrong, said in one place: every message names wanted, available and the option to change."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_LINE = 1000
"""Characters of one line of a message; a value that somebody typed may be a whole file."""


class LibraError(Exception):
    """Ends the launcher with `exit_code` and the message, without a stack trace."""

    exit_code = 1


class ConfigError(LibraError, ValueError):
    """One or more options cannot be right. All problems found are listed, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {readable(problem)}" for problem in self.problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        super().__init__(f"{len(self.problems)} {noun} in the configuration; nothing was started:\n{lines}")


def readable(text: str) -> str:
    """For a terminal: lines without their middle when they are too long, no character that would move the cursor."""
    return "\n".join(_shortened("".join(map(_visible, line))) for line in text.split("\n"))


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _shortened(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2 - 3
    return f"{line[:half]} ... {line[-half:]}"


class InterruptedRunError(LibraError):
    """Ctrl-C; the exit code is the shell's for SIGINT."""

    exit_code = 130


class RunFailedError(LibraError):
    """The run ended with a fatal cause; `exit_code` is the cause's own where it has one."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code or 1
