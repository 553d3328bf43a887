"""The stop that leaves a checkpoint: attempts/N/stop.json, written by the supervisor, looked for by trainer and controller.

The other stop is a signal (TERM): leave now, without a checkpoint.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stages.rundir import RunDir

KINDS = ("checkpoint",)


class StopRequestError(ValueError):
    """stop.json says something that no stage understands."""


class StopRequestedError(RuntimeError):
    """A stage noticed, while it waited, that it was asked to end with a checkpoint."""


@dataclass(frozen=True)
class StopRequest:
    """`reason` is for people; `grace_s` is how long the supervisor waits before it ends the steps."""

    kind: str
    reason: str
    grace_s: float

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise StopRequestError(f"stop.json has kind {self.kind!r}, wanted one of {KINDS}")

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> StopRequest:
        """Inverse of `to_record`; ignores what a record adds. Raises StopRequestError."""
        try:
            return cls(str(record["kind"]), str(record["reason"]), float(record["grace_s"]))
        except (KeyError, TypeError, ValueError) as error:
            raise StopRequestError(f"stop.json is incomplete or wrong: {error!r}") from error


def read_stop_request(run: RunDir) -> StopRequest | None:
    """What the supervisor of this attempt asked for; None when it did not. Raises StopRequestError."""
    record = run.read(run.stop_json)
    return None if record is None else StopRequest.from_record(record)


def write_stop_request(run: RunDir, request: StopRequest) -> None:
    run.write(run.stop_json, request.to_record())
