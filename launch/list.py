"""The runs below a folder, one line each: name, experiment, state, step, reward, when it was made, job.

    python -m launch.list [--root DIR] [--json]

Exit code 0 when there is a run, 2 when there is none. What a state means, and more about one run: `python -m launch.status`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch import figures
from launch.people import command, runs_below
from launch.truth import Truth, tell

TITLES = ("run", "experiment", "state", "step", "reward", "made", "job")


def main(words: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(words)
    rows = [row(truth, asked.root) for truth in sorted(tell(runs_below(asked.root)), key=_made)]
    if asked.json:
        print(json.dumps([dict(zip(TITLES, cells, strict=True)) for cells in rows], indent=1))
    else:
        print("\n".join(table([TITLES, *rows])))
    return 0


def row(truth: Truth, root: Path) -> tuple[str, ...]:
    """The cells of TITLES; empty where nothing is known."""
    folder = truth.folder
    progress = figures.progress(folder)
    below = root.absolute()
    name = folder.root.relative_to(below) if folder.root != below else folder.root
    made = _made(truth)
    return (
        str(name),
        figures.experiment(folder),
        truth.state,
        f"{progress.done}/{progress.total}" if progress.total else "",
        "" if progress.reward is None else f"{progress.reward:.3f}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(made)) if made else "",
        folder.job_id if folder.mode == "slurm" else folder.mode,
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; "-" for an empty one."""
    shown = [[cell or "-" for cell in cells] for cells in rows]
    widths = [max(len(cells[column]) for cells in shown) for column in range(len(shown[0]))]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in shown
    ]


def _made(truth: Truth) -> float:
    created = truth.folder.identity.get("created")
    return float(created) if isinstance(created, int | float) else 0.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.list", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(command(main))
