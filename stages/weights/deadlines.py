"""How long a refresh may take: what earlier refreshes measured, never less than a floor, never more than the options allow.

A deadline that is too short ends a sound run, one that is too long costs minutes after a rare fault; dead instances are
found by their heartbeats, long before. So the measured time gets a generous slack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from conf.schema import LibraConfig
from planner.plan import Plan
from stages.files import list_names
from stages.rundir import RunDir
from stages.weights.records import Loaded

SLACK = 4.0
ASSUMED_BYTES_PER_S = 100e6
"""Of one instance, until one was measured: a slow disk that several instances share."""
FORGETTING = 1.25
"""By how much the remembered slowest rate may rise from one refresh to the next: a slow moment counts for about ten refreshes."""
_SHORTEST_S = 1e-3


@dataclass(frozen=True)
class Before:
    """What the newest finished refresh of this run says; an older attempt's measurement counts, its quarantine does not."""

    version: int = -1
    slowest_bytes_per_s: float | None = None
    quarantined: tuple[str, ...] = ()


def read_before(run: RunDir, config: LibraConfig, version: int) -> Before:
    """Of the newest refresh before `version`; one with the other method measured something else."""
    names = (name for name in list_names(run.refreshed) if name < run.refreshed_json(version).name)
    newest_first = (run.refreshed / name for name in sorted(names, reverse=True))
    records = (run.read(path, any_attempt=True, skip_damaged=True) for path in newest_first)
    record = next((record for record in records if record is not None), None)
    if record is None:
        return Before()
    is_ours = record["attempt"] == run.attempt
    return Before(
        record["version"] if is_ours else -1,
        _rate(record) if record["method"] == config.rollout_weight_reload_method else None,
        tuple(record["quarantined"]) if is_ours else (),
    )


def _rate(record: dict[str, Any]) -> float | None:
    rate = record["slowest_bytes_per_s"]
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def slowest_bytes_per_s(answers: Iterable[Loaded], num_bytes: int, before: float | None) -> float:
    """The rate of the slowest instance, its wait for the node's lock left out, remembered from refresh to refresh."""
    now = min(num_bytes / max(answer.own_s, _SHORTEST_S) for answer in answers)
    return now if before is None else min(now, FORGETTING * before)


def turns(config: LibraConfig, plan: Plan) -> int:
    """How many instances of one node reload one after another, at most."""
    if config.rollout_weight_reload_strategy == "parallel":
        return 1
    nodes = Counter((place.component, place.node) for place in plan.rollout.instances)
    return max(nodes.values(), default=1)


def start_s(config: LibraConfig) -> float:
    """What replacing one server process may take."""
    return config.rollout.ready_timeout_s + config.rollout.stop_timeout_s


def refresh_deadline_s(
    config: LibraConfig, plan: Plan, num_bytes: int, measured_bytes_per_s: float | None, *, is_starting: bool
) -> float:
    """Seconds from the request to the last ACK. `is_starting`: some instance has yet to start its server.

    With method restart every refresh starts servers: that time is assumed until it has been measured, as part of the rate.
    """
    options, num_turns = config.weights, turns(config, plan)
    starts_s = num_turns * start_s(config) if config.rollout_weight_reload_method == "restart" else 0.0
    expected_s = SLACK * num_turns * num_bytes / (measured_bytes_per_s or ASSUMED_BYTES_PER_S)
    if measured_bytes_per_s is None:
        expected_s += starts_s
    longest_s = options.refresh_timeout_s + starts_s
    reload_s = min(longest_s, max(options.refresh_floor_s, expected_s))
    return reload_s + (start_s(config) if is_starting else 0.0)
