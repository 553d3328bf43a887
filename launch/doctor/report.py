"""The findings as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, Status

FORMAT = 1
FILE_WIDTH = 160
COLOURS = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "bold red", Status.NOT_TRIED: "dim"}


def table(findings: Sequence[Finding], out: TextIO) -> None:
    """One row for each finding, in groups by probe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = None if out.isatty() else max(FILE_WIDTH, shutil.get_terminal_size().columns)
    grid = Table("", "finding", "seen", "Libra will", show_lines=False, pad_edge=False)
    probe = findings[0].probe if findings else ""
    for finding in findings:
        if finding.probe != probe:
            probe = finding.probe
            grid.add_section()
        status = Text(finding.status.value, style=COLOURS[finding.status])
        grid.add_row(status, Text(finding.name), Text(finding.seen), Text(finding.libra))
    Console(file=out, width=width).print(grid)


def summary(evidence: Evidence, findings: Sequence[Finding], took_s: float) -> str:
    counts = Counter(finding.status for finding in findings)
    words = ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])
    what = "this machine, without Slurm" if evidence.slurm is None else f"Slurm and {len(evidence.nodes)} of its nodes"
    return f"{what}{' (quick)' if evidence.quick else ''}: {words}; {took_s:.0f} s"


def as_json(evidence: Evidence, findings: Sequence[Finding], took_s: float, profile: str) -> str:
    return json.dumps(
        {
            "format": FORMAT,
            "mode": evidence.mode,
            "quick": evidence.quick,
            "seconds": round(took_s, 1),
            "nodes": list(evidence.nodes),
            "job_id": evidence.job.job_id,
            "profile": profile,
            "findings": [finding.to_dict() for finding in findings],
        },
        indent=1,
    )
