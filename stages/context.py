"""What every stage gets: its run, its configuration, its place in the plan, its recorder, its stop flag."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from conf.load import load
from conf.schema import LibraConfig
from planner.plan import Plan
from stages.rundir import RunDir, RunNotFoundError
from traces.recorder import Recorder


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

    def check_stop(self) -> None:
        """Raise StoppedError once the stage was asked to stop; pass it as `check` to `stages.files.wait_for`."""
        if self.stop.is_set():
            raise StoppedError(f"{self.name} was asked to stop")


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
) -> Iterator[StageContext]:
    """Read the run directory for one task of a stage and close its recorder at the end. Raises RunNotFoundError."""
    run = RunDir.open(Path(run_dir), writer=name, attempt=attempt)
    config = load(run.config_yaml)
    record = run.read(run.plan_json, any_attempt=True)
    if record is None:
        raise RunNotFoundError(f"{run.root} has no plan.json; a run is made by `python -m launch`")
    directory = Path(config.trace.directory) if config.trace.directory else run.traces
    trace_rank = rank if role != "rollout" else int(name.rsplit("_", 1)[1])
    recorder = Recorder(directory, role, trace_rank, world_size, name, enabled=config.phase_trace_enabled)
    try:
        yield StageContext(run, config, Plan.from_dict(record), role, name, rank, world_size, local_rank, recorder)
    finally:
        recorder.close()
