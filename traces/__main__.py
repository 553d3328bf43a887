"""`python -m traces export|summary|picture RUN`. RUN is a run directory, any folder, one trace file, or a pattern."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from traces.chrome import Exported, export
from traces.picture import DEFAULT_STEPS, MissingMatplotlibError, NoSuchStepError, draw
from traces.reader import NoTracesError
from traces.report import render
from traces.run import RunTrace
from traces.summary import summarise


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 2 when there are no traces or the output can not be made."""
    options = _parser().parse_args(arguments)
    commands = {"export": _export, "summary": _summary, "picture": _picture}
    try:
        commands[options.command](options)
    except (NoTracesError, NoSuchStepError, MissingMatplotlibError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m traces", description="Look at where the time of a run went.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("run", metavar="RUN", help="run directory, folder with trace files, one trace file, or a pattern")
    exporting = commands.add_parser("export", parents=[run], help="write a trace for Perfetto or chrome://tracing")
    exporting.add_argument("--out", type=Path, help="output file (default RUN/trace.json)")
    exporting.add_argument("--gzip", action="store_true", help="compress; both viewers read .json.gz")
    summary = commands.add_parser("summary", parents=[run], help="print phases, overlap, GPU-hour ledger, steps")
    summary.add_argument("--json", action="store_true", help="as JSON")
    picture = commands.add_parser("picture", parents=[run], help="draw a few steps as PNG or SVG (needs matplotlib)")
    picture.add_argument("--out", type=Path, help="output file (default RUN/trace.png)")
    picture.add_argument("--first-step", type=int, help="first step drawn (default: in the middle of the run)")
    picture.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="number of steps (default %(default)s)")
    return parser


def _export(options: argparse.Namespace) -> None:
    run = RunTrace(options.run)
    out = options.out or _beside(options.run, "trace.json")
    if options.gzip and out.suffix != ".gz":
        out = out.with_name(out.name + ".gz")
    print(_export_message(export(run, out)))


def _export_message(exported: Exported) -> str:
    size_mb = exported.path.stat().st_size / 1e6
    lines = [
        f"Wrote {exported.path} ({exported.num_events} events of {exported.num_processes} processes, "
        f"{exported.duration_s:.1f} s, {size_mb:.1f} MB).",
        "To look at it, open https://ui.perfetto.dev in a browser, choose 'Open trace file' and pick it; the file stays",
        "on your machine. Without Internet: chrome://tracing in Chrome or Chromium, then 'Load'.",
    ]
    if exported.num_unfinished:
        lines.append(
            f"{exported.num_unfinished} phases without end (process killed, or still running), marked 'unfinished'."
        )
    lines += [f"Skipped {count} torn or foreign lines in {path}." for path, count in exported.bad_lines.items()]
    if exported.num_dropped:
        lines.append(f"{exported.num_dropped} records were lost while recording (disk full?).")
    return "\n".join(lines)


def _summary(options: argparse.Namespace) -> None:
    summary = summarise(RunTrace(options.run))
    print(json.dumps(summary.as_json(), indent=2) if options.json else render(summary))


def _picture(options: argparse.Namespace) -> None:
    out = options.out or _beside(options.run, "trace.png")
    draw(RunTrace(options.run), out, first_step=options.first_step, num_steps=options.steps)
    print(f"Wrote {out}")


def _beside(where: str, name: str) -> Path:
    """In the folder itself; beside a single file; in the working directory for a pattern."""
    path = Path(where)
    if path.is_dir():
        return path / name
    return path.parent / name if path.is_file() else Path(name)


if __name__ == "__main__":
    sys.exit(main())
