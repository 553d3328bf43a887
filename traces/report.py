"""The summary as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from traces.phases import LedgerClass
from traces.summary import Summary

_MAX_STEPS_SHOWN = 20


def render(summary: Summary) -> str:
    """Tables of plain text, without a trailing newline."""
    attempts = f", attempts {', '.join(map(str, summary.attempts))}" if len(summary.attempts) > 1 else ""
    parts = [f"{summary.run}: {summary.duration_s:.1f} s{attempts}"]
    parts.append(_phases(summary))
    parts.append(_overlap(summary))
    parts.append(_ledger(summary))
    if summary.steps:
        parts.append(_steps(summary))
    parts += _health(summary)
    return "\n\n".join(parts)


def _phases(summary: Summary) -> str:
    header = ["role", "phase", "count", "total s", "p50 s", "p95 s", "max s", "unfinished"]
    rows = [
        [
            row.role,
            row.phase,
            str(row.count),
            *_seconds(row.total_s, row.p50_s, row.p95_s, row.max_s),
            str(row.unfinished),
        ]
        for row in summary.phases
    ]
    return _table(header, rows, num_text_columns=2)


def _overlap(summary: Summary) -> str:
    overlap = summary.overlap
    text = f"generating {overlap.generation_s:.1f} s, training {overlap.training_s:.1f} s, both {overlap.both_s:.1f} s"
    if overlap.training_s and overlap.generation_s:
        shares = (overlap.both_s / overlap.training_s, overlap.both_s / overlap.generation_s)
        text += f" ({shares[0]:.0%} of training, {shares[1]:.0%} of generation)"
    return text


def _ledger(summary: Summary) -> str:
    roles = sorted(summary.ledger)
    if not roles:
        return "No process of this run holds a GPU slot: no ledger."
    whole = sum(sum(classes.values()) for classes in summary.ledger.values())
    unit, unit_s = ("slot-hours", 3600.0) if whole >= 3600 else ("slot-seconds", 1.0)
    rows = []
    for ledger_class in [*map(str, LedgerClass), "all"]:
        cells = [
            sum(summary.ledger[role].values()) if ledger_class == "all" else summary.ledger[role][ledger_class]
            for role in roles
        ]
        share = sum(cells) / whole if whole else 0.0
        amounts = [f"{amount / unit_s:.2f}" for amount in [*cells, sum(cells)]]
        rows.append([ledger_class, *amounts, f"{share:.1%}"])
    return _table([unit, *roles, "all", "share"], rows, num_text_columns=1)


def _steps(summary: Summary) -> str:
    counts = {term: sum(step.dominated_by == term for step in summary.steps) for term in ("data", "train", "weights")}
    said = ", ".join(f"{term} in {count}" for term, count in counts.items() if count)
    shown = summary.steps[-_MAX_STEPS_SHOWN:]
    rows = [
        [str(step.attempt), str(step.step), *_seconds(step.data_s, step.train_s, step.weights_s), step.dominated_by]
        for step in shown
    ]
    table = _table(["attempt", "step", "data s", "train s", "weights s", "most"], rows, num_text_columns=0)
    left_out = len(summary.steps) - len(shown)
    note = f" (the last {len(shown)}; --json has the {left_out} before)" if left_out else ""
    return f"What {len(summary.steps)} steps spent most time on: {said}{note}\n{table}"


def _health(summary: Summary) -> Iterable[str]:
    for path, count in summary.bad_lines.items():
        yield f"{path}: {count} torn or foreign lines skipped"
    if summary.dropped_records:
        yield f"{summary.dropped_records} records were lost while recording (disk full?)"
    if summary.open_processes:
        yield f"no orderly end (killed, or still running): {', '.join(summary.open_processes)}"
    for host, shift_s in summary.clock_shifts_s.items():
        yield f"{host}: clock shifted by {shift_s:+.6f} s, messages contradicted it"


def _seconds(*values: float) -> list[str]:
    return [f"{value:.3f}" for value in values]


def _table(header: list[str], rows: list[list[str]], num_text_columns: int) -> str:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if column < num_text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
