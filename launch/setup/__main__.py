"""`python -m launch.setup`: what `make venv` runs, with any Python 3.11, from the root of the checkout."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.setup.errors import SetupError
from launch.setup.install import TORCH_VARIABLE, install
from launch.setup.stamp import fingerprint, is_current

PROJECT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.setup", description=__doc__)
    parser.add_argument("--venv", type=Path, default=PROJECT / ".venv")
    parser.add_argument("--check", action="store_true", help="install nothing; exit code 1 when something is missing")
    options = parser.parse_args(arguments)
    venv = options.venv.absolute()
    if options.check:
        return 0 if is_current(venv, fingerprint(PROJECT)) else 1
    started = time.monotonic()
    try:
        installed = install(PROJECT, venv, os.environ.get(TORCH_VARIABLE) or None)
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    if installed:
        print(f"installed in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
