"""What the commands for people share: how they end when something is wrong, when Ctrl-C comes, when their reader leaves."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from launch.errors import LibraError
from launch.runs import NotARunError, find_runs
from launch.truth import readable
from stages.files import DamagedRecordError

INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE


def runs_below(root: Path) -> list[Path]:
    """Those that can be looked at; the others are named on stderr. Raises NotARunError when there is none."""
    found, problems = readable(find_runs(root))
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    if not found:
        raise NotARunError(f"there is no run below {root}; name another folder with --root")
    return found


def command(main: Callable[[], int]) -> int:
    """The exit code of `main`. A LibraError is said on stderr without a stack trace; Ctrl-C says nothing."""
    try:
        code = main()
        print(end="", flush=True)  # also where there is no standard output (`>&-`)
        return code
    except LibraError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except DamagedRecordError as error:
        print(f"{error}; see what else is left with: python -m launch.status RUN", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # `... | head`; otherwise the interpreter complains once more when it flushes stdout at its end.
        _close_output()
        return BROKEN_PIPE
    except OSError as error:  # a full disk or a read-only folder, say, for a record or for what is printed
        print(f"the system refused: {error}", file=sys.stderr)
        _close_output()
        return 1


def _close_output() -> None:
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
