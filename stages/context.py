"""What every stage gets: its run, its configuration, its place in the plan, its recorder, its stop flag."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from conf.load import load
from conf.reads import reads_of, track
from conf.schema import LibraConfig
from planner.plan import Plan
from stages.files import read_json
from stages.rundir import FencedError, RunDir, RunNotFoundError
from stages.stopping import StopRequest, StopRequestedError, read_stop_request
from stages.weights.filesystems import must_flush
from traces.recorder import Recorder

STOP_LOOK_S = 0.2
"""How often stop.json is looked for, at most; the waits that ask for it poll faster than a shared filesystem likes."""


class StoppedError(RuntimeError):
    """The stage was asked to stop while it waited."""


@dataclass
class StageContext:
    """`name` is the step's name (trainer, rollout_000, controller); `rank` of `world_size` counts the step's tasks."""

    run: RunDir
    config: LibraConfig
    plan: Plan
    role: str
    name: str
    rank: int
    world_size: int
    local_rank: int
    recorder: Recorder
    stop: threading.Event = field(default_factory=threading.Event)
    _stop_request: StopRequest | None = field(default=None, repr=False)
    _stop_looked_s: float = field(default=float("-inf"), repr=False)

    def stop_request(self) -> StopRequest | None:
        """What the supervisor asked this attempt to do before it ends it; None when it did not, as of STOP_LOOK_S ago."""
        now_s = time.monotonic()
        if self._stop_request is None and now_s - self._stop_looked_s >= STOP_LOOK_S:
            self._stop_looked_s = now_s
            self._stop_request = read_stop_request(self.run)
        return self._stop_request

    def check_stop_request(self) -> None:
        """Raise StopRequestedError once this attempt was asked to end with a checkpoint."""
        request = self.stop_request()
        if request is not None:
            raise StopRequestedError(f"{self.name} was asked to end with a checkpoint: {request.reason}")

    def check_stop(self) -> None:
        """Raise StoppedError once the stage was asked to stop; pass it as `check` to `stages.files.wait_for`."""
        if self.stop.is_set():
            raise StoppedError(f"{self.name} was asked to stop")


def trace_rank(role: str, name: str, rank: int) -> int:
    """A rollout step is a world of its own, so its track is numbered by the instance."""
    return int(name.rsplit("_", 1)[1]) if role == "rollout" else rank


def num_slots(plan: Plan, role: str, name: str) -> int | None:
    """GPUs that one process of the step holds; None leaves the recorder's default for the role."""
    if role != "rollout":
        return None
    return next((placement.tp for placement in plan.rollout.instances if placement.name == name), 1)


@contextmanager
def open_context(
    role: str,
    run_dir: str | Path,
    *,
    name: str,
    attempt: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    local_rank: int = 0,
    alone: bool = False,
) -> Iterator[StageContext]:
    """Read the run directory for one task of a stage. At the end, close its recorder and write which options it read.

    `alone` is for a stage that a person starts by hand: it leaves no such record, and on a run that is over the trace stays
    as it is. Raises RunNotFoundError.
    """
    run = RunDir.open(Path(run_dir), writer=name, attempt=attempt)
    config = track(load(run.config_yaml))
    run = replace(run, flush_exchange=must_flush(config.weights.fsync, run.root))
    record = run.read(run.plan_json, any_attempt=True)
    if record is None:
        raise RunNotFoundError(f"{run.root} has no plan.json; a run is made by `python -m launch`")
    directory = Path(config.trace.directory) if config.trace.directory else run.traces
    plan = Plan.from_dict(record)
    recorder = Recorder(
        directory,
        role,
        trace_rank(role, name, rank),
        world_size,
        name,
        enabled=config.phase_trace_enabled and not (alone and read_json(run.summary_json)),
        num_slots=num_slots(plan, role, name),
    )
    try:
        yield StageContext(run, config, plan, role, name, rank, world_size, local_rank, recorder)
    finally:
        recorder.close()
        if not alone:
            write_reads(run, config, name, rank)


def write_reads(run: RunDir, config: LibraConfig, name: str, rank: int) -> None:
    """For the launcher's warning about options that nothing reads (`launch.unread`), which can do without: no error of it
    takes the place of how the stage ended."""
    try:
        run.write(run.reads_json(name, rank), {"options": sorted(reads_of(config))})
    except (FencedError, OSError) as error:
        print(f"{name} rank {rank}: which options it read is not recorded: {error}", file=sys.stderr, flush=True)
