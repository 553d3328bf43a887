"""Which rollout instances of the plan still belong to the run: all but those that the supervisor gave up."""

from __future__ import annotations

from collections.abc import Mapping

from planner.plan import Plan
from stages.rundir import RunDir


def given_up(run: RunDir) -> dict[str, str]:
    """Instances that this attempt goes on without, with the reason; they never come back within it."""
    record = run.read(run.given_up_json)
    return {} if record is None else {str(name): str(reason) for name, reason in record["instances"].items()}


def write_given_up(run: RunDir, instances: Mapping[str, str]) -> None:
    run.write(run.given_up_json, {"instances": dict(instances)})


def members(run: RunDir, plan: Plan) -> list[str]:
    """Names of the instances that have to serve every version, in the plan's order."""
    gone = given_up(run)
    return [placement.name for placement in plan.rollout.instances if placement.name not in gone]
