"""`python -m launch +experiment=... overrides`: the Hydra entry. Its contents may be pickled by value, so it stays tiny."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from launch.compose import compose, hydra_command_line
        from launch.errors import LibraError
        from launch.pipeline import launch
    except ModuleNotFoundError as error:
        print(f"{sys.executable} lacks {error.name}: `make venv`, then `source .venv/bin/activate`", file=sys.stderr)
        return 2

    arguments = sys.argv[1:]
    overrides = [text for text in arguments if not text.startswith("-")]
    try:
        if len(overrides) < len(arguments):
            compose([text for text in overrides if "=" in text and "," not in text])
            return hydra_command_line(launch)
        launch(overrides)
    except LibraError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
