"""One line of metrics.jsonl as a person reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PHASES_PER_LINE = 4
COLUMNS = ("step", "reward", "tokens/s", "staleness", "version", "sync s", "step s", "ETA")


class JsonLines:
    """Follows an append-only JSON-lines file: `new()` yields the records that were completed since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self._path, "rb") as handle:
                handle.seek(self._offset)
                data = handle.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def cells(record: dict[str, Any]) -> tuple[str, ...]:
    """The values of COLUMNS for a training step's record."""
    return (
        f"{record['step'] + 1}/{record['total_steps']}",
        f"{record['reward']:.3f}",
        f"{record['tokens_per_s']:,.0f}",
        f"{record['staleness_mean']:.2f} (max {record['staleness_max']})",
        f"v{record['version']}",
        f"{record['sync_s']:.3f}",
        f"{record['step_s']:.2f}",
        duration(record["eta_s"]),
    )


def step_line(record: dict[str, Any]) -> str:
    pairs = zip(COLUMNS, cells(record), strict=True)
    return "  ".join(f"{name} {value}" for name, value in pairs)


def evaluation_line(record: dict[str, Any]) -> str:
    return (
        f"evaluation of v{record['version']} on {record['problems']} held-out problems:"
        f" greedy {record['greedy_reward']:.3f}, sampled {record['sampled_reward']:.3f}"
    )


def duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def from_here(path: Path | str) -> str:
    """Relative to the working directory when it lies below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else str(path)


def summary_text(summary: dict[str, Any], run_dir: Path) -> str:
    """What a run ends with: reward before and after, time per phase, the checkpoint, the next command."""
    lines = []
    if summary.get("reward_before") is not None:
        lines += [
            "                 before   after",
            f"greedy reward     {summary['reward_before']:.3f}   {summary['reward_after']:.3f}   (held-out problems)",
            f"sampled reward    {summary['sampled_before']:.3f}   {summary['sampled_after']:.3f}   (temperature 1)",
        ]
    refresh = sorted(summary["weight_refresh_s"][1:])  # the first one waits for vLLM to start
    lines.append(
        f"steps             {summary['steps']} in {duration(summary['wall_s'])}, attempts {summary['attempts']}"
    )
    phases = sorted(summary["phase_s"].items(), key=lambda item: -item[1])
    texts = [f"{name} {seconds:.1f} s" for name, seconds in phases if name != "steps"]
    heads = ["time per phase    "] + [" " * 18] * len(texts)
    rows = [texts[start : start + PHASES_PER_LINE] for start in range(0, len(texts), PHASES_PER_LINE)]
    lines.extend(head + ", ".join(row) for head, row in zip(heads, rows, strict=False))
    if refresh:
        lines.append(f"weight refresh    median {refresh[len(refresh) // 2]:.3f} s, slowest {refresh[-1]:.3f} s")
    lines.append(f"checkpoint        {from_here(summary['checkpoint'])}  (a HF folder: transformers loads it)")
    lines.append(f"trace             make trace RUN={from_here(run_dir)}")
    return "\n".join(lines)
