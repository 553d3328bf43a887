"""`python -m launch.doctor.inside.node FOLDER RANK`: one of these runs on each node and measures what is in `probes`.

The report is written anew after each measurement, so that a node that gets stuck (a filesystem that hangs) still says in
which one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from launch.doctor.inside.meeting import Meeting, Scene
from launch.doctor.order import Order, read_order
from launch.doctor.probes import MEASURES
from launch.job_environment import JobEnvironment
from stages.files import make_directory, write_json_atomic

RANK_VARIABLE = "SLURM_PROCID"
NODE_VARIABLE = "SLURMD_NODENAME"
"""Slurm's name of the node, which need not be the host's."""


def main(folder: str) -> int:
    order = read_order(Path(folder))
    rank = JobEnvironment(os.environ).count(RANK_VARIABLE, 0)
    node = os.environ.get(NODE_VARIABLE) or socket.gethostname()
    measure_all(order, rank, node)
    return 0


def measure_all(order: Order, rank: int, node: str) -> dict[str, Any]:
    """Every measurement in turn; one that fails leaves its error and does not stop the others."""
    world = order.nodes
    meeting = Meeting(make_directory(order.path / "meeting"), rank, world, order.limits.peers_s)
    scene = Scene(order, node, meeting)
    report: dict[str, Any] = {"node": node, "rank": rank, "done": False}
    for key, measure in MEASURES:
        _write(order, {**report, "doing": key})
        try:
            report[key] = measure(scene)
        except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
            report[key] = {"error": f"{type(error).__name__}: {error}"}
    report["done"] = True
    _write(order, report)
    return report


def _write(order: Order, report: dict[str, Any]) -> None:
    write_json_atomic(make_directory(order.reports) / f"node.{report['rank']}.json", report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
