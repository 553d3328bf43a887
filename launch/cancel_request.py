"""How people ask a run to end: attempts/N/cancel.json, written by `launch.cancel`, looked at by the supervisor each tick.

A file and no signal: it reaches the supervisor on whatever host it runs, with or without Slurm, and says what is wanted. A
later request replaces an earlier one, and only ever hurries: one without a checkpoint also counts while a checkpoint is being
saved. An attempt that has not started yet finds the request when it does.
"""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

from stages.rundir import RunDir


class CancelRequestError(ValueError):
    """cancel.json says something that no supervisor understands."""


@dataclass(frozen=True)
class CancelRequest:
    """`checkpoint`: end in two phases, with a checkpoint first; else end now. `by` is for people."""

    checkpoint: bool
    by: str

    @property
    def reason(self) -> str:
        """What the run's cause and its stop request say."""
        return f"the run was cancelled by {self.by}{' (launch.cancel --checkpoint)' if self.checkpoint else ''}"

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> CancelRequest:
        """Inverse of `to_record`; ignores what a record adds. Raises CancelRequestError."""
        checkpoint, by = record.get("checkpoint"), record.get("by")
        if not isinstance(checkpoint, bool) or not isinstance(by, str):
            raise CancelRequestError(f"cancel.json is incomplete or wrong: checkpoint={checkpoint!r}, by={by!r}")
        return cls(checkpoint, by)


def read_cancel_request(run: RunDir) -> CancelRequest | None:
    """What people asked this attempt to do; None when they did not. Raises CancelRequestError, DamagedRecordError."""
    record = run.read(run.cancel_json)
    return None if record is None else CancelRequest.from_record(record)


def write_cancel_request(run: RunDir, request: CancelRequest) -> None:
    """`run` is opened at its newest attempt. Raises FencedError when a newer one has started since."""
    run.write(run.cancel_json, request.to_record())


def me() -> str:
    """ "user@host", for `by`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
