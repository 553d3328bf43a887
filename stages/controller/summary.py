"""summary.json: what a run reached and where its time went, for comparison with other runs."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from stages.controller.evaluation import Evaluation
from stages.controller.history import History
from stages.controller.ledger import LedgerState
from stages.controller.progress import Progress
from stages.files import list_names
from stages.rundir import RunDir


@dataclass
class Summary:
    """Collects what is needed. Phases that follow each other: earlier_attempts, start_up, evaluate_before, steps, evaluate_after.

    `began` is when this attempt's controller was started, and for the first of a run when the run was created.
    """

    run: RunDir
    created: float
    began: float
    before: Evaluation | None = None
    after: Evaluation | None = None
    started_steps: float = 0.0
    ended_steps: float = 0.0

    @classmethod
    def of(cls, run: RunDir, *, is_first: bool) -> Summary:
        record = run.read(run.run_json, any_attempt=True)
        assert record is not None  # RunDir.open has read it
        return cls(run, record["created"], record["created"] if is_first else time.time())

    def write(self, progress: Progress, ledger: LedgerState, history: History) -> dict[str, Any]:
        """Write summary.json and return its content. Steps are those that count, whichever attempt trained them."""
        now = time.time()
        before = asdict(self.before) if self.before is not None else history.before or {}
        after, lines = self.after, history.steps.values()
        payload = {
            "reward_before": before.get("greedy_reward"),
            "reward_after": None if after is None else after.greedy_reward,
            "sampled_before": before.get("sampled_reward"),
            "sampled_after": None if after is None else after.sampled_reward,
            "problems": None if after is None else after.problems,
            "steps": progress.trained_steps,
            "steps_trained_again": history.left_behind,
            "wall_s": now - self.created,
            "phase_s": self._phases(history, now),
            "weight_refresh_s": self._refresh_s(progress),
            "checkpoint": str(self.run.weights_version(progress.served_version)),
            "attempts": self.run.attempt + 1,
            "response_tokens": sum(line["response_tokens"] for line in lines),
            "staleness_max": max((line["staleness_max"] for line in lines), default=0),
            "groups": {"issued": ledger.issued, "dropped": ledger.dropped_for},
        }
        self.run.write(self.run.summary_json, payload)
        return payload

    def _phases(self, history: History, now: float) -> dict[str, float]:
        """Seconds. The first ones follow each other; the others lie inside `steps` of this or an earlier attempt, and overlap."""
        evaluate_before = 0.0 if self.before is None else self.before.seconds
        phases = {"earlier_attempts": self.began - self.created} if self.began > self.created else {}
        phases |= {
            "start_up": self.started_steps - self.began - evaluate_before,
            "evaluate_before": evaluate_before,
            "steps": self.ended_steps - self.started_steps,
            "evaluate_after": now - self.ended_steps,
            "generate": sum(line["generate_s"] for line in history.steps.values()),
        }
        for line in history.steps.values():
            for name, seconds in line["seconds"].items():
                phases[name] = phases.get(name, 0.0) + seconds
        return phases

    def _refresh_s(self, progress: Progress) -> list[float]:
        """One for each version that was served, also those that older attempts served and whose records are still there."""
        found = {}
        for name in list_names(self.run.refreshed):
            record = self.run.read(self.run.refreshed / name, any_attempt=True, skip_damaged=True)
            if record is not None and record["version"] <= progress.served_version:
                found[record["version"]] = record["refresh_s"]
        found |= {version: record["refresh_s"] for version, record in progress.refreshed.items()}
        return [found[version] for version in sorted(found)]
