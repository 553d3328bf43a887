"""What is a run doing, and where does its time go?

    python -m launch.status RUN                   everything about one run
    python -m launch.status --all [--root DIR]    a line about each run below a folder (default: runs)
    python -m launch.status RUN --json            the same facts for scripts

Looks for up to 1.5 s whether supervisor and instances are alive; asks squeue once; needs no accounting; changes nothing.

Exit code 0: pending, starting, running, stopping, requeued or succeeded; 1: failed, vanished, half-deleted or unknown (with
--all: any of them); 2: no run directory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.figures import DISK_BUDGET_S
from launch.people import command, runs_below
from launch.report import headline, report, text
from launch.truth import tell

DISK_BUDGET_OF_MANY_S = 1.0


def main(words: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(words)
    roots = runs_below(asked.root) if asked.all else [asked.run]
    truths = tell(roots)
    budget_s = DISK_BUDGET_S if not asked.all else DISK_BUDGET_OF_MANY_S / len(roots)
    reports = [report(truth, disk_budget_s=budget_s) for truth in truths]
    if asked.json:
        said = [one.to_dict() for one in reports]
        print(json.dumps(said if asked.all else said[0], indent=1))
    else:
        print("\n".join((headline if asked.all else text)(one) for one in reports))
    return max(truth.exit_code for truth in truths)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("run", metavar="RUN", type=Path, nargs="?", help="run directory")
    which.add_argument("--all", action="store_true", help="every run below --root")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="folder of runs, for --all (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(command(main))
