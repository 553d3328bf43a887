"""`python -m launch +experiment=... overrides`. Its contents may be pickled by value, so it stays tiny."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from launch.command_line import run
    except ModuleNotFoundError as error:
        print(f"{sys.executable} lacks {error.name}: `make venv`, then `source .venv/bin/activate`", file=sys.stderr)
        return 2
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
