"""`python -m planner RUN` prints the plan of a run; `python -m planner +experiment=... overrides` makes one."""

from __future__ import annotations

import sys
from pathlib import Path

from planner.describe import describe
from planner.errors import PlanError
from planner.plan import Plan
from stages.files import DamagedRecordError, read_json

USAGE = "usage: python -m planner RUN | python -m planner +experiment=NAME [overrides]"


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        return 2
    if len(arguments) == 1 and "=" not in arguments[0]:
        return _of_run(Path(arguments[0]))
    return _from_overrides(arguments)


def _of_run(folder: Path) -> int:
    try:
        record = read_json(folder / "plan.json")
        text = describe(Plan.from_dict(record)) if record is not None else ""
    except (OSError, DamagedRecordError) as error:
        print(f"{error}; {USAGE}", file=sys.stderr)
        return 2
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        print(f"{folder}/plan.json is no plan of this release ({type(error).__name__}: {error})", file=sys.stderr)
        return 2
    print(text or f"{folder} holds no plan.json; {USAGE}", file=sys.stdout if text else sys.stderr)
    return 0 if text else 2


def _from_overrides(overrides: list[str]) -> int:
    # launch owns composition; imported here so that the planner itself stays below it
    from launch.errors import LibraError
    from launch.pipeline import prepare

    try:
        print(describe(prepare(overrides).plan))
    except (LibraError, PlanError) as error:
        print(error, file=sys.stderr)
        return getattr(error, "exit_code", 2)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
