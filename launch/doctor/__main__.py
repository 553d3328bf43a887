"""`python -m launch.doctor [--quick] [overrides]`."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from launch.doctor.command import run
    except ModuleNotFoundError as error:
        print(f"{sys.executable} lacks {error.name}: `make venv`, then `source .venv/bin/activate`", file=sys.stderr)
        return 2
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
