"""How long a checkpoint takes, as the newest one says."""

from __future__ import annotations

from launch.stops import Measured
from stages.checkpoint import newest
from stages.rundir import RunDir


class CheckpointTimes:
    """Reads commit records only, and again only when there is another checkpoint."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._steps: list[int] = []
        self._known: Measured | None = None

    def latest(self) -> Measured | None:
        """None while there is no sound checkpoint."""
        steps = self._run.published_checkpoints()
        if steps != self._steps:
            self._steps = steps
            checkpoint = newest(self._run, tell=_nothing)
            found = None if checkpoint is None else checkpoint.manifest
            self._known = None if found is None else Measured(found.save_s, found.step_s)
        return self._known


def _nothing(_: str) -> None:
    """A damaged checkpoint is told of by who loads it."""
