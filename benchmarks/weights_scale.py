"""What a refresh asks of the filesystem and of the trainer as instances become many.

`python -m benchmarks.weights_scale [--instances 64 128 256 512] [--per-node 4] [--folder F] [--json]` makes a run of so many
instances in one process: the product's trainer asks, the product's agents answer one after another (their engine does nothing),
the trainer reads and checks all answers. File operations below the run are counted by who does them. Nothing is trained or
generated, and all instances share one host and its page cache: seconds are of this machine, counts are of any.

Exit code 1 when checking all answers of the last row takes 2 s or longer, or when operations grow faster than instances.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.watched_files import Operation, WatchedFiles
from conf.schema import LibraConfig
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.context import StageContext
from stages.files import POLL_FIRST_S, POLL_LAST_S, POLL_SHARE
from stages.rollout.client import GuardAnswer
from stages.rollout.follow import Follower
from stages.rollout.orders import Order
from stages.rollout.registration import Registration
from stages.rundir import RunDir
from stages.weights.instances import InstanceStatus
from stages.weights.manifest import Manifest, Probe
from stages.weights.publish import publish
from stages.weights.reader import load_manifest
from stages.weights.refresh import request_refresh
from stages.weights.tensors import LocalTensor
from traces.recorder import Recorder

TARGET_S = 2.0
VERSION = 1
PROBE = Probe((1, 2, 3), (-1.0, -2.0))
METADATA = "stat"
"""Kind of operation that clients answer from their cache as a rule."""


@dataclass(frozen=True)
class Row:
    """Of one refresh; operations without `stat`, whose number is `*_stats`. `check_s`: from the last answer to the end."""

    instances: int
    nodes: int
    check_s: float
    trainer_operations: int
    trainer_stats: int
    instance_operations: float
    instance_stats: float

    @property
    def total_operations(self) -> float:
        return self.trainer_operations + self.instances * self.instance_operations


class CountedFiles(WatchedFiles):
    """Counts for whoever is `who` now."""

    who = "trainer"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.of: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> CountedFiles:
        super().__enter__()
        return self

    def before(self, operation: Operation) -> None:
        self.of[self.who, "stats" if operation.kind == METADATA else "operations"] += 1

    @contextmanager
    def counted_for(self, who: str) -> Iterator[None]:
        before, self.who = self.who, who
        try:
            yield
        finally:
            self.who = before


class Keeper:
    """In place of the agent's server and of its reader: looks at the manifest as they and the worker do, and says that all is well."""

    def __init__(self, run: RunDir, num_bytes: int) -> None:
        self._run, self._num_bytes = run, num_bytes

    @property
    def reader(self) -> Keeper:
        return self

    @contextmanager
    def reading(self, version: int, digest: str, **_: Any) -> Iterator[None]:
        load_manifest(self._run, version, digest)
        yield

    def pause(self, timeout_s: float) -> None: ...

    def order(self, order: Order, what: str) -> GuardAnswer:
        if what == "prepare":
            for _ in ("server", "worker"):
                load_manifest(self._run, order.version, order.digest)
            return GuardAnswer(200, {"bytes": self._num_bytes, "prepare_s": 0.0})
        proof = {"max_difference": 0.0, "tolerance": 0.01, "tokens": len(PROBE.logprobs)}
        return GuardAnswer(200, {"proof": proof, "paused_s": 0.0, "swap_s": 0.0})


def main(words: Sequence[str] | None = None) -> int:
    """Print the table, or the same as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights_scale", description=__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=[64, 128, 256, 512], help="one row for each number")
    parser.add_argument("--per-node", type=int, default=4, help="instances of one node (default %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the runs are made (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    options = parser.parse_args(words)
    rows = [measured(number, options.per_node, options.folder) for number in sorted(options.instances)]
    print(json.dumps([asdict(row) for row in rows], indent=2) if options.json else table(rows))
    return 0 if rows[-1].check_s < TARGET_S and is_linear(rows) else 1


def measured(instances: int, per_node: int, folder: Path | None) -> Row:
    """One refresh of `instances` instances."""
    with tempfile.TemporaryDirectory(prefix="libra-scale-", dir=folder) as place:
        return _refresh(Path(place), [f"rollout_{index:03d}" for index in range(instances)], per_node)


def is_linear(rows: Sequence[Row]) -> bool:
    """No row needs more operations for each instance than the row before, but for a hundredth."""
    each = [row.total_operations / row.instances for row in rows]
    return all(later <= 1.01 * before for before, later in pairwise(each))


def looks(seconds: float) -> int:
    """How often the trainer lists the answers in so many seconds without a new one."""
    waited_s, number = 0.0, 0
    while waited_s < seconds:
        waited_s, number = waited_s + min(max(POLL_FIRST_S, POLL_SHARE * waited_s), POLL_LAST_S), number + 1
    return number


def table(rows: Sequence[Row]) -> str:
    """Markdown, with what does not depend on the number of instances below."""
    head = "instances|nodes|all answers checked s|operations of the trainer|for each instance|of one instance|in all"
    lines = [f"| {head.replace('|', ' | ')} |", f"|{' --- |' * len(head.split('|'))}"]
    for row in rows:
        cells = (
            row.instances,
            row.nodes,
            f"{row.check_s:.3f}",
            row.trainer_operations,
            f"{row.trainer_operations / row.instances:.2f}",
            f"{row.instance_operations:.1f}",
            f"{row.total_operations:,.0f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    last = rows[-1]
    lines += [
        "",
        f"Beside these, stat: {last.trainer_stats / last.instances:.1f} of the trainer and {last.instance_stats:.1f} of the "
        "instance for each instance.",
        f"While it waits the trainer lists the answers {looks(1)} times in the first second, {looks(10)} in ten, "
        f"{looks(60)} in a minute, however many instances there are.",
    ]
    return "\n".join(lines)


# ---- one refresh -----------------------------------------------------------------------------------------------------


def _refresh(folder: Path, names: Sequence[str], per_node: int) -> Row:
    run, plan = RunDir.create(folder / "run"), _plan(names, per_node)
    manifest = _publish(replace(run, writer="trainer"), folder / "model")
    followers = [_follower(_context(run, plan, "rollout", name), manifest) for name in names]
    done = threading.Event()
    ended_s = 0.0
    with CountedFiles(run.root) as files:

        def answer() -> None:
            nonlocal ended_s
            if not done.is_set():
                done.set()
                with files.counted_for("instance"):
                    for follower in followers:
                        follower.step()
                ended_s = time.perf_counter()

        result = request_refresh(_context(run, plan, "trainer", "trainer"), manifest, names, 0.0, answer)
        check_s = time.perf_counter() - ended_s
    if len(result.instances) != len(names):
        raise RuntimeError(f"{len(result.instances)} of {len(names)} instances count as served")
    of = files.of
    each = (of["instance", "operations"] / len(names), of["instance", "stats"] / len(names))
    nodes = plan.rollout.instances[-1].node + 1
    return Row(len(names), nodes, check_s, of["trainer", "operations"], of["trainer", "stats"], *each)


def _plan(names: Sequence[str], per_node: int) -> Plan:
    places = tuple(InstancePlacement(name, 1, 1, index // per_node) for index, name in enumerate(names))
    layout = TrainLayout(1, 1, 1, 1, 1, 1, 1, 1)
    return Plan("hetjob", "benchmark", "cpu", layout, RolloutLayout(len(places), 1, places[-1].node + 1, places))


def _context(run: RunDir, plan: Plan, role: str, name: str) -> StageContext:
    recorder = Recorder(run.traces, role, 0, 1, name, enabled=False)
    return StageContext(replace(run, writer=name), LibraConfig(), plan, role, name, 0, 1, 0, recorder)


def _publish(run: RunDir, model: Path) -> Manifest:
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    tensors = [LocalTensor.whole(f"layer.{index}", torch.zeros(64, 64)) for index in range(100)]
    options = LibraConfig().weights
    return publish(
        run, version=VERSION, step=VERSION, tensors=tensors, probe=PROBE, source_folder=model, options=options
    )


def _follower(context: StageContext, manifest: Manifest) -> Follower:
    """The agent of an instance that serves, and has not seen the request."""
    status = InstanceStatus(context.name, "ready", "http://127.0.0.1:1", "node", -1, "", 0, 1, 2, "cpu", 1)
    registration = Registration(context.run, status, context.config.rollout.heartbeat_interval_s)
    registration.update()
    keeper: Any = Keeper(context.run, manifest.weight_bytes)
    return Follower(context, keeper, registration)


if __name__ == "__main__":
    raise SystemExit(main())
