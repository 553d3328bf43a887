"""metrics.jsonl: one line for each trained step, merged from batch manifest, receipt and refreshed record.

One writer, this stage; readers (display, docs, comparisons) may see the file at any moment, so a line is one write.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

from stages.batches import BatchManifest

WINDOW_STEPS = 20


class MetricsFile:
    """Appends JSON lines to `path`; first takes away half a line that a killed writer may have left at its end."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        data = path.read_bytes()
        os.ftruncate(self._fd, data.rfind(b"\n") + 1)

    def write(self, line: dict[str, Any]) -> None:
        data = (json.dumps({**line, "time": time.time()}) + "\n").encode()
        if os.write(self._fd, data) != len(data):
            raise OSError("metrics.jsonl could not be written completely (is the disk full?)")

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass
class StepMetrics:
    """Turns the records of a step into its line. Rates and the time left are means over the last WINDOW_STEPS steps."""

    total_steps: int
    last_s: float = field(default_factory=time.monotonic)
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    recent_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def line(
        self,
        manifest: BatchManifest,
        receipt: dict[str, Any],
        refreshed: dict[str, Any] | None,
        version: int,
        step_s: float | None = None,
    ) -> dict[str, Any]:
        """`version` is the one served from this step on.

        `refreshed` is None when the step publishes none (sync_interval > 1); sync_s and publish_s are 0 then. `step_s` is
        given for a step that another process saw; else it is the time since the line before.
        """
        now = time.monotonic()
        step_s, self.last_s = max(now - self.last_s if step_s is None else step_s, 1e-9), now
        self.recent_s.append(step_s)
        self.recent_tokens.append(manifest.response_tokens)
        return {
            "step": manifest.step,
            "total_steps": self.total_steps,
            "reward": manifest.reward_mean,
            "response_tokens": manifest.response_tokens,
            "tokens_per_s": sum(self.recent_tokens) / sum(self.recent_s),
            "version": version,
            "sync_s": 0.0 if refreshed is None else refreshed["refresh_s"],
            "publish_s": 0.0 if refreshed is None else refreshed["publish_s"],
            "step_s": step_s,
            "eta_s": (self.total_steps - manifest.step - 1) * fmean(self.recent_s),
            **manifest.extra,
            **{name: receipt[name] for name in _FROM_RECEIPT},
            "seconds": receipt["seconds"],
        }


_FROM_RECEIPT = (
    "loss",
    "grad_norm",
    "learning_rate",
    "clip_fraction",
    "logprob_difference_max",
    "logprob_difference_mean",
)
