"""The records of the protocol: request, prepared, loaded, refusal. Strict both ways: `from_record` checks every field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stages.weights.fields import Fields

METHODS = ("restart", "inplace")
STRATEGIES = ("parallel", "serial")
PHASES = ("prepare", "commit", "proof")
PARTS = ("lock_wait_s", "process_stop_s", "model_load_s", "paused_s", "prepare_s")
"""Measured parts of `Loaded.total_reload_s`."""
CLOCK_SLACK_S = 1e-3
"""A part may exceed the total by this much: they are separate clock readings, rounded when written."""


@dataclass(frozen=True)
class RefreshRequest:
    """The trainer asks a complete set of instances to serve `version`.

    `path` is relative to the run directory; `deadline_s` counts from the writing of the request. `retries` counts, by name,
    how often an instance that refused was asked again: the same request, written anew.
    """

    version: int
    path: str
    digest: str
    method: str
    strategy: str
    instances: tuple[str, ...]
    deadline_s: float
    time: float
    retries: dict[str, int] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> RefreshRequest:
        fields = Fields(record, what)
        request = cls(
            version=fields.integer("version"),
            path=fields.text("path"),
            digest=fields.text("digest"),
            method=fields.text("method", METHODS),
            strategy=fields.text("strategy", STRATEGIES),
            instances=fields.texts("instances"),
            deadline_s=fields.number("deadline_s"),
            time=fields.number("time"),
            retries=fields.counts("retries"),
        )
        fields.finish()
        if request.path != f"weights/v{request.version:06d}":
            raise fields.error("path", f"{request.path!r} is not the folder of version {request.version}")
        if not request.instances or list(request.instances) != sorted(set(request.instances)):
            raise fields.error("instances", f"wanted a sorted set of names, got {list(request.instances)}")
        return request


@dataclass(frozen=True)
class Prepared:
    """All weights of the version (`bytes`, without the small files) were read and verified; the old version still serves."""

    instance: str
    version: int
    digest: str
    bytes: int
    prepare_s: float
    host: str
    retry: int = 0

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> Prepared:
        fields = Fields(record, what)
        prepared = cls(
            instance=fields.text("instance"),
            version=fields.integer("version"),
            digest=fields.text("digest"),
            bytes=fields.integer("bytes", 1),
            prepare_s=fields.number("prepare_s"),
            host=fields.text("host"),
            retry=fields.integer("retry"),
        )
        fields.finish()
        return prepared


@dataclass(frozen=True)
class Proof:
    """Log-probs of the probe by the engine against the trainer's: largest difference and its limit, in nats."""

    max_difference: float
    tolerance: float
    tokens: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> Proof:
        fields = Fields(record, f"{what}, proof")
        proof = cls(fields.number("max_difference"), fields.number("tolerance"), fields.integer("tokens", 1))
        fields.finish()
        if proof.max_difference > proof.tolerance:
            raise fields.error("max_difference", f"{proof.max_difference} exceeds the tolerance {proof.tolerance}")
        return proof


@dataclass(frozen=True)
class Loaded:
    """The instance serves `version` and has proved it.

    `total_reload_s` runs from seeing the request to the proof and contains all other times: waiting for the node's
    lock (`serial`), stopping the old process and loading (`restart`), the time in which generation stood still,
    and reading with verification.
    """

    instance: str
    version: int
    digest: str
    method: str
    strategy: str
    lock_wait_s: float
    process_stop_s: float
    model_load_s: float
    total_reload_s: float
    paused_s: float
    prepare_s: float
    proof: Proof
    host: str
    server_response: dict[str, Any]
    retry: int = 0

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def own_s(self) -> float:
        """What the instance itself needed, without the wait for its turn on the node."""
        return max(0.0, self.total_reload_s - self.lock_wait_s)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> Loaded:
        fields = Fields(record, what)
        loaded = cls(
            instance=fields.text("instance"),
            version=fields.integer("version"),
            digest=fields.text("digest"),
            method=fields.text("method", METHODS),
            strategy=fields.text("strategy", STRATEGIES),
            lock_wait_s=fields.number("lock_wait_s"),
            process_stop_s=fields.number("process_stop_s"),
            model_load_s=fields.number("model_load_s"),
            total_reload_s=fields.number("total_reload_s"),
            paused_s=fields.number("paused_s"),
            prepare_s=fields.number("prepare_s"),
            proof=Proof.from_record(fields.mapping("proof"), what),
            host=fields.text("host"),
            server_response=fields.mapping("server_response"),
            retry=fields.integer("retry"),
        )
        fields.finish()
        for name in PARTS:
            if getattr(loaded, name) > loaded.total_reload_s + CLOCK_SLACK_S:
                raise fields.error(name, f"{getattr(loaded, name)} exceeds total_reload_s {loaded.total_reload_s}")
        return loaded


@dataclass(frozen=True)
class Nack:
    """The instance refuses `version` and goes on with `serving_version` (-1: it serves nothing).

    `tensor` names the one at fault when there is one, else it is empty. `retry` is the request's, for this instance.
    """

    instance: str
    version: int
    digest: str
    phase: str
    error: str
    serving_version: int
    tensor: str = ""
    retry: int = 0

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> Nack:
        fields = Fields(record, what)
        nack = cls(
            instance=fields.text("instance"),
            version=fields.integer("version"),
            digest=fields.text("digest"),
            phase=fields.text("phase", PHASES),
            error=fields.text("error"),
            serving_version=fields.integer("serving_version", -1),
            tensor=fields.text("tensor", empty=True),
            retry=fields.integer("retry"),
        )
        fields.finish()
        return nack
