"""Whether an attempt has anything left to do; trainer and controller ask the same question and must get the same answer."""

from __future__ import annotations

from conf.schema import LibraConfig
from stages.rundir import RunDir


def is_over(run: RunDir, config: LibraConfig, step: int) -> bool:
    """Is there nothing left for an attempt that starts from `step`?

    A run that was trained to its end but not summed up (it died in the last evaluation) is not over. summary.json is written
    last, and by this attempt only when there was something left, so both sides see the same.
    """
    if step != config.total_steps:
        return step > config.total_steps
    summary = run.read(run.summary_json, any_attempt=True)
    return summary is not None and summary.get("steps") == step


def nothing_left(config: LibraConfig, step: int) -> str:
    return f"nothing left to train: checkpoint is at step {step} of {config.total_steps}"
