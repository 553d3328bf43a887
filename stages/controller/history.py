"""What metrics.jsonl says about the time before this controller was started."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEFORE, AFTER = "before", "after"
"""When an evaluation was made: before the first step, after the last."""


@dataclass
class History:
    """`steps` has the line of every step that still counts. `left_behind` counts lines of steps that were trained again."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    left_behind: int = 0
    before: dict[str, Any] | None = None

    @property
    def num_reported(self) -> int:
        """Steps 0 to this one, without it, all have their line."""
        count = 0
        while count in self.steps:
            count += 1
        return count

    def add(self, record: dict[str, Any]) -> None:
        event = record.get("event")
        if event is None:
            self.left_behind += record["step"] in self.steps
            self.steps[record["step"]] = record
        elif event == "resumed":
            beyond = [step for step in self.steps if step >= record["from_step"]]
            self.left_behind += len(beyond)
            for step in beyond:
                del self.steps[step]
        elif event == "evaluation" and record.get("when") == BEFORE:
            self.before = record


def read_history(path: Path) -> History:
    """Of whole lines; empty when there is no such file. A line that is no record is named and passed over."""
    history = History()
    if not path.exists():
        return history
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            continue
        try:
            history.add(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            print(
                f"warning: {path} line {number} is no record of a run ({error!r}); the summary will miss it", flush=True
            )
    return history
