"""Weights of a run, for people:

    python -m stages.weights inspect RUN            what is published, who serves what, the last refreshes
    python -m stages.weights verify RUN [VERSION]   read every byte of a version (default: the newest) and compare digests
    python -m stages.weights diff RUN V1 V2         which tensors differ, and by how much

Exit code 0: sound (diff: also when the versions differ); 1: damaged or missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stages.files import DamagedRecordError
from stages.rundir import RunDir, RunDirectoryError
from stages.weights.errors import WeightsError
from stages.weights.reader import faults, load_manifest
from stages.weights.report import describe_difference, inspect_lines


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        run = RunDir.open(options.run, writer="stages.weights")
        if options.command == "inspect":
            return _print(inspect_lines(run))
        if options.command == "verify":
            return _verify(run, options.version)
        return _print(describe_difference(run, options.first, options.second))
    except (WeightsError, RunDirectoryError, DamagedRecordError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stages.weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="what is published, and who serves what")
    verify = commands.add_parser("verify", help="compare every byte of a version with its manifest")
    diff = commands.add_parser("diff", help="compare two versions tensor by tensor")
    for command in (inspect, verify, diff):
        command.add_argument("run", type=Path, help="run directory")
    verify.add_argument("version", type=int, nargs="?", help="version number; default: the newest")
    diff.add_argument("first", type=int)
    diff.add_argument("second", type=int)
    return parser


def _print(lines: Sequence[str]) -> int:
    print("\n".join(lines))
    return 0


def _verify(run: RunDir, version: int | None) -> int:
    if version is None:
        latest = run.read(run.latest_json, any_attempt=True)
        if latest is None:
            print(f"error: {run.root} has published no weights yet", file=sys.stderr)
            return 1
        version = int(latest["version"])
    manifest = load_manifest(run, version)
    started_s = time.monotonic()
    found = faults(run, manifest)
    for fault in found:
        print(fault)
    elapsed_s = time.monotonic() - started_s
    print(
        f"version {version}: {len(manifest.tensors)} tensors in {len(manifest.files)} files, {manifest.total_bytes:,} "
        f"bytes read in {elapsed_s:.2f} s: {f'{len(found)} faults' if found else 'all digests match'}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
