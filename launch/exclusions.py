"""Nodes that the run shall not get again: RUN/excluded_nodes.json, kept over attempts, written by the supervisor.

`#SBATCH --exclude` of the next job comes from it; a person who knows better deletes the file.
"""

from __future__ import annotations

import time

from stages.rundir import RunDir


def excluded_nodes(run: RunDir) -> dict[str, str]:
    """Host -> why, of all attempts; empty when there is none."""
    record = run.read(run.excluded_nodes_json, any_attempt=True) or {}
    return {host: str(entry["reason"]) for host, entry in record.get("nodes", {}).items()}


def exclude(run: RunDir, host: str, reason: str) -> bool:
    """Put `host` on the list; False when it is there already."""
    record = run.read(run.excluded_nodes_json, any_attempt=True) or {}
    nodes = dict(record.get("nodes", {}))
    if host in nodes:
        return False
    nodes[host] = {"reason": reason, "attempt": run.attempt, "time": time.time()}
    run.write(run.excluded_nodes_json, {"nodes": nodes})
    return True
