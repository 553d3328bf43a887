"""`python -m launch.doctor.inside.driver FOLDER`: the batch shell of the doctor's job; starts everything else, in order.

Without Slurm the doctor itself calls `drive`, with plain processes instead of steps. Progress and what failed are written
to `reports/driver.json` after each program.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from launch.doctor.inside.steps import LocalSteps, Running, Size, SlurmSteps, Steps
from launch.doctor.order import Limits, Order, read_order
from launch.doctor.probes import collective, engine, gpus
from launch.doctor.probes.gpus import OTHER_WAYS, SIDE_BY_SIDE
from launch.srun import Allocation
from stages.files import list_names, make_directory, read_json, write_json_atomic

LOCAL_RANKS_LIMIT = 16


def main(folder: str) -> int:
    for signum in (signal.SIGTERM, signal.SIGUSR1):  # cancelled; the time limit comes
        signal.signal(signum, _leave)
    order = read_order(Path(folder))
    allocation = Allocation.from_environment(os.environ)
    Driver(order, SlurmSteps(order, allocation), allocation.hosts[0]).drive()
    return 0


def _leave(_signum: int, _frame: object) -> NoReturn:
    """An exception, so that the steps are killed on the way out."""
    raise SystemExit(143)


def drive_here(order: Order) -> None:
    """The same on this machine."""
    Driver(order, LocalSteps(order), (os.uname().nodename,)).drive()


def nodes_deadline_s(limits: Limits) -> float:
    """All waits of `inside.node` one after another; it ends far earlier when nothing hangs."""
    return limits.import_s + 4 * limits.peers_s + 2 * (limits.listed_s + limits.exists_s) + 12 * limits.transfer_s


def longest_s(limits: Limits) -> float:
    """Of everything that a job of the doctor may do, and half a minute."""
    return nodes_deadline_s(limits) + 3 * limits.step_s + 2 * limits.program_s + 30.0


class Driver:
    def __init__(self, order: Order, steps: Steps, hosts: Sequence[str]) -> None:
        self._order = order
        self._steps = steps
        self._report: dict[str, Any] = {"nodes": list(hosts), "doing": "", "done": False, "steps": {}}
        make_directory(order.reports)

    def drive(self) -> None:
        try:
            self._nodes()
            if self._order.mode == "slurm":
                self._side_by_side()
            if not self._order.quick:
                self._collective()
                self._engine()
            self._report["done"] = True
            self._write("")
        finally:
            self._steps.kill_all()

    def _write(self, doing: str) -> None:
        self._report["doing"] = doing
        write_json_atomic(self._order.reports / "driver.json", self._report)

    def _ended(self, running: Running, deadline_s: float) -> str:
        """Wait for a program and note what it said when it failed."""
        said = running.wait(deadline_s)
        self._report["steps"][running.name] = {"said": said}
        return said

    # ---- one after another ---------------------------------------------------------------------------------------

    def _nodes(self) -> None:
        order = self._order
        self._write("measuring on the nodes")
        size = Size(nodes=order.nodes, cpus=order.step_cpus, gpus=order.gpus)
        self._ended(self._steps.start("nodes", "node", [], size), nodes_deadline_s(order.limits))

    def _side_by_side(self) -> None:
        order = self._order
        self._write("starting steps side by side")
        sizes = {"side_a": min(order.gpus, 1), "side_b": 1, "side_cpu": 0}
        if order.gpus < 2:
            sizes["side_b"] = 0
        wanted = [name for name in SIDE_BY_SIDE if not (order.gpus == 1 and name == "side_b")]
        wanted = wanted[: max(1, order.cpus // order.threads)]
        started = [
            self._steps.start(name, "step", [name, *wanted], self._trivial(name, sizes[name])) for name in wanted
        ]
        for running in started:
            self._ended(running, order.limits.step_s)
        with_gpu = [name for name in wanted if sizes[name]]
        if with_gpu and not any(f"step.{name}.json" in list_names(order.reports) for name in with_gpu):
            for name, flag in OTHER_WAYS.items():
                running = self._steps.start(name, "step", [name], self._trivial(name, 1), [flag.format(1)])
                self._ended(running, order.limits.step_s)

    def _trivial(self, name: str, gpus: int) -> Size:
        return Size(cpus=self._order.threads, gpus=gpus, role="controller" if name == "side_cpu" else "rollout")

    def _cards(self) -> int:
        """GPUs on each node that are really there and visible, the least of all nodes."""
        reports = [read_json(self._order.reports / f"node.{rank}.json") or {} for rank in range(self._order.nodes)]
        measured = [report.get(gpus.KEY, {}) for report in reports]
        return min(gpus.usable(facts) if "cards" in facts else 0 for facts in measured)

    def _collective(self) -> None:
        order, cards = self._order, self._cards()
        per_node = cards or 1
        ranks = order.nodes * per_node
        if ranks == 1:
            what = "one GPU" if cards else "no GPU"
            self._report["steps"][collective.PROGRAM] = {"skipped": f"{what} on one node: nothing to reduce between"}
            return
        self._write("all-reduce between the GPUs" if cards else "all-reduce between the nodes (no GPU)")
        words = ["nccl" if cards else "gloo", str(ranks), str(per_node)]
        if order.mode == "slurm":
            cores = max(1, order.cpus // order.threads // per_node)
            size = Size(order.nodes, per_node, cores * order.threads, cards)
            self._ended(self._steps.start(collective.PROGRAM, "collective", words, size), order.limits.program_s)
            return
        names = [
            collective.PROGRAM,
            *(f"{collective.PROGRAM}.{rank}" for rank in range(1, min(ranks, LOCAL_RANKS_LIMIT))),
        ]
        started = [
            self._steps.start(name, "collective", [*words, str(rank)], Size()) for rank, name in enumerate(names)
        ]
        for running in started:
            self._ended(running, order.limits.program_s)

    def _engine(self) -> None:
        device = "cuda" if self._cards() else "cpu"
        self._write(f"starting a vLLM server ({device}); this takes up to a few minutes")
        size = Size(cpus=self._order.cpus, gpus=int(device == "cuda"), role="rollout")
        self._ended(self._steps.start(engine.PROGRAM, "engine", [device], size), self._order.limits.program_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
