"""`python -m launch.doctor.inside.step FOLDER NAME [PARTNER ...]`: a trivial step that says which GPUs it sees.

It stays until its partners run too, so that they are known to have run at the same time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.doctor.order import read_order
from launch.doctor.probes.gpus import visibility
from stages.files import WaitTimeoutError, list_names, make_directory, wait_for, write_json_atomic


def main(folder: str, name: str, partners: Sequence[str]) -> int:
    order = read_order(Path(folder))
    present = make_directory(order.path / "side")
    write_json_atomic(present / name, {})
    seen = visibility()
    together = True
    try:
        wait_for(
            lambda: set(partners) <= set(list_names(present)) or None,
            deadline_s=order.limits.step_s / 2,
            awaited=f"steps {', '.join(partners)}",
            from_whom="the driver",
        )
    except WaitTimeoutError:
        together = False
    report = {**seen, "together": together, "cpus": len(os.sched_getaffinity(0))}
    write_json_atomic(make_directory(order.reports) / f"step.{name}.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
