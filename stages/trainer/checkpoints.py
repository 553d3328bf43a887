"""When the trainer saves, and how it goes on from what was saved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from stages.checkpoint.collect import collect_checkpoints, set_aside
from stages.checkpoint.errors import SaveError
from stages.checkpoint.find import Checkpoint
from stages.checkpoint.fingerprint import fingerprint
from stages.checkpoint.load import load_newest
from stages.checkpoint.manifest import Fingerprint, Layout
from stages.checkpoint.save import save
from stages.context import StageContext
from stages.trainer.parallel import RankGrid, TrainerRanks
from stages.trainer.policy import Policy
from stages.trainer.state import restore, state_to_fill, state_to_save
from stages.weights.collect import drop_versions

RECENT_STEPS = 20


@dataclass
class Checkpoints:
    """All ranks call everything here together. `saved_step` is that of the newest checkpoint to go on from; 0: there is none."""

    context: StageContext
    policy: Policy
    grid: RankGrid
    saved_step: int = 0
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _is_late: bool = False
    _model: Fingerprint | None = None

    # ---- going on ------------------------------------------------------------------------------------------------

    def resume(self, steps: Sequence[int]) -> int:
        """The step to go on from: that of the newest sound checkpoint of `steps`, now loaded; 0 when there are none at all.

        What an older attempt left beyond that step is removed before anybody can take it for this attempt's: weight
        versions, checkpoints. attempts/N/start.json then tells the step. Raises the errors of `stages.checkpoint.load`.
        """
        started_s = time.monotonic()
        name = ""
        if steps:
            with self.context.recorder.span("restore_checkpoint") as span:
                checkpoint = self._restore(steps)
                span.add(step=checkpoint.step, bytes=checkpoint.manifest.total_bytes)
            self.saved_step, name = checkpoint.step, checkpoint.path.name
        load_s = time.monotonic() - started_s
        if self.grid.is_first:
            self._leave_the_rest_behind()
            record = {"step": self.saved_step, "checkpoint": name, "load_s": load_s}
            self.context.run.write(self.context.run.start_json, record)
            if name:
                print(f"going on from {name}, loaded in {load_s:.2f} s", flush=True)
        return self.saved_step

    def _restore(self, steps: Sequence[int]) -> Checkpoint:
        trainable = self.policy.trainable
        tensors = state_to_fill(trainable)
        checkpoint = load_newest(
            self.context.run,
            steps,
            into=tensors,
            layout=self._layout(),
            model=self._fingerprint(),
            ranks=TrainerRanks(self.grid),
            tell=self._tell,
        )
        restore(trainable, tensors)
        return checkpoint

    def _leave_the_rest_behind(self) -> None:
        run = self.context.run
        versions = drop_versions(run, self.saved_step)
        aside = set_aside(run, self.saved_step)
        if versions or aside:
            print(
                f"beyond step {self.saved_step}: removed weight versions {list(versions)}, set checkpoints {list(aside)} aside",
                flush=True,
            )

    # ---- saving --------------------------------------------------------------------------------------------------

    def took_step(self, seconds: float) -> None:
        """How long a step took, from boundary to boundary: the supervisor waits for one before it ends the steps."""
        self._seconds.append(seconds)

    def save_when_due(self, step: int) -> None:
        """After `step` optimizer steps: save when save_interval says so, at the end, and after a save that failed.

        With an older checkpoint at hand a failure is told, and tried again after the next step; without one it is raised.
        """
        interval, total_steps = self.context.config.save_interval, self.context.config.total_steps
        if not interval or not (step % interval == 0 or step == total_steps or self._is_late):
            return
        try:
            self.save(step)
        except SaveError as failure:
            if not self.saved_step:
                raise
            self._is_late = True
            self._tell(
                f"warning: {failure}; going on with checkpoint step_{self.saved_step:06d}, next try after the next step"
            )

    def save(self, step: int) -> None:
        """Raises SaveError on all ranks."""
        if step == self.saved_step:
            return
        self.grid.synchronize()
        with self.context.recorder.span("save_checkpoint", step=step) as span:
            saved = save(
                self.context.run,
                step=step,
                tensors=state_to_save(self.policy.trainable),
                layout=self._layout(),
                model=self._fingerprint(),
                step_s=median(self._seconds) if self._seconds else 0.0,
                ranks=TrainerRanks(self.grid),
            )
            span.add(bytes=saved.manifest.total_bytes)
        self.saved_step, self._is_late = step, False
        if self.grid.is_first:
            collect_checkpoints(self.context.run, self.context.config.keep_latest_checkpoints)
        self._tell(f"{saved.path.name}: {saved.manifest.total_bytes:,} bytes saved in {saved.manifest.save_s:.2f} s")

    def first_needed_batch(self, trained_steps: int) -> int:
        """Batches from here on are trained again when the oldest kept checkpoint must be gone on from."""
        if not self.context.config.save_interval:
            return trained_steps
        return min(self.context.run.published_checkpoints(), default=0)

    def _layout(self) -> Layout:
        grid = self.grid
        return Layout(grid.tp, grid.dp, grid.world_size, self.context.config.train_dtype)

    def _fingerprint(self) -> Fingerprint:
        if self._model is None:
            self._model = fingerprint(self.context.config)
        return self._model

    def _tell(self, text: str) -> None:
        if self.grid.is_first:
            print(text, flush=True)
