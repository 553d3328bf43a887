"""summary.json: what a run reached and where its time went, for comparison with other runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from stages.batches import BatchManifest
from stages.controller.evaluation import Evaluation
from stages.controller.ledger import LedgerState
from stages.controller.progress import Progress
from stages.rundir import RunDir


@dataclass
class Summary:
    """Collects what is needed. Phases that follow each other: start_up, evaluate_before, steps, evaluate_after."""

    run: RunDir
    created: float
    before: Evaluation | None = None
    after: Evaluation | None = None
    manifests: list[BatchManifest] = field(default_factory=list)
    started_steps: float = 0.0
    ended_steps: float = 0.0

    @classmethod
    def of(cls, run: RunDir) -> Summary:
        record = run.read(run.run_json, any_attempt=True)
        assert record is not None  # RunDir.open has read it
        return cls(run, record["created"])

    def write(self, progress: Progress, ledger: LedgerState) -> dict[str, Any]:
        """Write summary.json and return its content."""
        now = time.time()
        before, after = self.before, self.after
        payload = {
            "reward_before": None if before is None else before.greedy_reward,
            "reward_after": None if after is None else after.greedy_reward,
            "sampled_before": None if before is None else before.sampled_reward,
            "sampled_after": None if after is None else after.sampled_reward,
            "problems": None if after is None else after.problems,
            "steps": progress.trained_steps,
            "wall_s": now - self.created,
            "phase_s": self._phases(progress, now),
            "weight_refresh_s": [progress.refreshed[version]["refresh_s"] for version in sorted(progress.refreshed)],
            "checkpoint": str(self.run.weights_version(progress.served_version)),
            "attempts": self.run.attempt + 1,
            "response_tokens": sum(manifest.response_tokens for manifest in self.manifests),
            "staleness_max": max((manifest.extra["staleness_max"] for manifest in self.manifests), default=0),
            "groups": {"issued": ledger.issued, "dropped": ledger.dropped_for},
        }
        self.run.write(self.run.summary_json, payload)
        return payload

    def _phases(self, progress: Progress, now: float) -> dict[str, float]:
        """Seconds. The first four follow each other; the others lie inside `steps` and overlap each other."""
        evaluate_before = 0.0 if self.before is None else self.before.seconds
        phases = {
            "start_up": self.started_steps - self.created - evaluate_before,
            "evaluate_before": evaluate_before,
            "steps": self.ended_steps - self.started_steps,
            "evaluate_after": now - self.ended_steps,
            "generate": sum(manifest.extra["generate_s"] for manifest in self.manifests),
        }
        for receipt in progress.receipts.values():
            for name, seconds in receipt["seconds"].items():
                phases[name] = phases.get(name, 0.0) + seconds
        return phases
