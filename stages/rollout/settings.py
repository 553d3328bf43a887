"""What the agent tells its server, through one environment variable (nothing of it on the command line)."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from stages.rollout.errors import UnguardedTokenError
from stages.rundir import RunDir

SETTINGS_VARIABLE = "LIBRA_ROLLOUT_SERVER"
SERVER_ID_VARIABLE = "LIBRA_ROLLOUT_SERVER_ID"
"""Marks every process of one server, so that what is left of it is found without looking at names."""


@dataclass(frozen=True)
class ServerSettings:
    """`start_folder` is what the engine was started from; `start_version` the version of its weights (model_path: 0).

    `serve_unproved`: answer from the start, before any version was proved (a model served alone, without a trainer).
    `proof_tolerance` and `proof_resolution` (see `stages.weights.proof`) in nats; `trace_directory` empty writes no spans.
    """

    run_root: str
    run_id: str
    attempt: int
    instance: str
    token_file: str
    start_folder: str
    start_version: int
    serve_unproved: bool
    weights_dtype: str
    proof_tolerance: float
    agent_pid: int
    listen_fd: int
    trace_directory: str = ""
    proof_resolution: float = float("inf")

    def to_environment(self) -> dict[str, str]:
        return {SETTINGS_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ServerSettings:
        """Raises KeyError when this process was not started by a rollout agent."""
        return cls(**json.loads(environment[SETTINGS_VARIABLE]))

    def run_dir(self) -> RunDir:
        return RunDir(Path(self.run_root), self.run_id, self.attempt, self.instance)


def read_token_digest(token_file: Path) -> bytes:
    """SHA-256 of the run's token. Raises UnguardedTokenError unless the file is the user's own and nobody else's."""
    status = token_file.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UnguardedTokenError(
            f"{token_file} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}; "
            f"wanted user {os.geteuid()} and mode 0600 (chmod 600 {token_file})"
        )
    token = token_file.read_text(encoding="ascii").strip()
    if len(token) < 16:
        raise UnguardedTokenError(f"the token in {token_file} has {len(token)} characters, wanted at least 16")
    return hashlib.sha256(token.encode()).digest()
