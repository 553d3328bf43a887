"""What a probe says: what was seen, whether that is a problem, and what Libra does about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """`NOTE`: works, and is worth knowing. `NOT_TRIED`: nothing is claimed."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Finding:
    """`libra` says what Libra will do, or what the user must do. `probe` is the name of the file that judged."""

    name: str
    status: Status
    seen: str
    libra: str
    probe: str = ""

    def to_dict(self) -> dict[str, str]:
        return {
            "probe": self.probe,
            "name": self.name,
            "status": self.status.value,
            "seen": self.seen,
            "libra": self.libra,
        }


def ok(name: str, seen: str, libra: str) -> Finding:
    return Finding(name, Status.OK, seen, libra)


def note(name: str, seen: str, libra: str) -> Finding:
    return Finding(name, Status.NOTE, seen, libra)


def problem(name: str, seen: str, libra: str) -> Finding:
    return Finding(name, Status.PROBLEM, seen, libra)


def not_tried(name: str, why: str, libra: str) -> Finding:
    return Finding(name, Status.NOT_TRIED, why, libra)


def has_problems(findings: Iterable[Finding]) -> bool:
    return any(finding.status is Status.PROBLEM for finding in findings)
