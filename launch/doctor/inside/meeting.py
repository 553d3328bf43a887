"""How the node programs talk: small files in the doctor's folder, found by listing. The thing under test is also the channel."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.doctor.order import Order
from stages.files import DamagedRecordError, make_directory, read_json, wait_for, write_json_atomic


@dataclass(frozen=True)
class Meeting:
    """Rank `rank` of `world` node programs, each with a name."""

    folder: Path
    rank: int
    world: int
    deadline_s: float

    def say(self, topic: str, **payload: Any) -> None:
        """Publish once: what this rank has to say about `topic`."""
        write_json_atomic(make_directory(self.folder / topic) / f"{self.rank}.json", payload)

    def hear(self, topic: str, rank: int, deadline_s: float | None = None) -> dict[str, Any]:
        """Raises WaitTimeoutError."""
        path = make_directory(self.folder / topic) / f"{rank}.json"
        return wait_for(
            lambda: read_json(path),
            deadline_s=self.deadline_s if deadline_s is None else deadline_s,
            awaited=f"'{topic}'",
            from_whom=f"node number {rank}",
        )

    def hear_all(
        self, topic: str, ranks: Iterable[int] | None = None, deadline_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Of all ranks, in order. Raises WaitTimeoutError."""
        return [self.hear(topic, rank, deadline_s) for rank in (range(self.world) if ranks is None else ranks)]


@dataclass(frozen=True)
class Scene:
    """What a measuring function gets."""

    order: Order
    node: str
    meeting: Meeting

    @property
    def rank(self) -> int:
        return self.meeting.rank

    @property
    def world(self) -> int:
        return self.meeting.world

    def place(self, name: str) -> Path:
        """A folder of the doctor's own on the run root, shared by all ranks."""
        return make_directory(self.order.path / name)


def put(path: Path, payload: dict[str, Any]) -> None:
    """As `write_json_atomic` without the two fsyncs: for measurements whose waiting the disk should not lengthen."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as handle:
        handle.write(json.dumps(payload))
    os.replace(temporary, path)


def get(path: Path) -> dict[str, Any]:
    """Raises DamagedRecordError when the file is gone; it was listed before."""
    record = read_json(path)
    if record is None:
        raise DamagedRecordError(f"{path} was listed and cannot be read")
    return record
