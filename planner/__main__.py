"""`python -m planner RUN` prints the plan of a run; `python -m planner +experiment=... overrides` makes one."""

from __future__ import annotations

import sys
from pathlib import Path

from planner.describe import describe
from planner.errors import PlanError
from planner.plan import Plan
from stages.files import read_json

USAGE = "usage: python -m planner RUN | python -m planner +experiment=NAME [overrides]"


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        return 2
    if len(arguments) == 1 and "=" not in arguments[0]:
        record = read_json(Path(arguments[0]) / "plan.json")
        if record is None:
            print(f"{arguments[0]} holds no plan.json; {USAGE}", file=sys.stderr)
            return 2
        print(describe(Plan.from_dict(record)))
        return 0
    return _from_overrides(arguments)


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
