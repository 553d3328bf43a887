"""The trainer's side of the protocol: ask all instances to serve a version, and believe only complete, equal answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from conf.schema import LibraConfig
from stages.context import StageContext
from stages.files import WaitTimeoutError, list_names, make_directory, wait_for
from stages.rundir import RunDir
from stages.weights.errors import InstanceSilentError, RecordError, WeightRefreshError
from stages.weights.instances import read_statuses
from stages.weights.manifest import Manifest
from stages.weights.patience import Patience
from stages.weights.records import PARTS, Loaded, Nack, Prepared, RefreshRequest

Answer = TypeVar("Answer", Prepared, Loaded, Nack)


@dataclass(frozen=True)
class RefreshResult:
    """`refresh_s` from the writing of the request to the last valid ACK; `slowest` names that instance and its parts."""

    version: int
    digest: str
    refresh_s: float
    publish_s: float
    slowest: dict[str, Any]
    instances: tuple[str, ...]

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


def request_refresh(
    context: StageContext,
    manifest: Manifest,
    instances: Sequence[str],
    publish_s: float,
    check: Callable[[], None] | None = None,
) -> RefreshResult:
    """Ask `instances` (the complete set) to serve the version of `manifest`, and wait until each has proved it.

    Every field of every ACK is checked; ACKs of an older attempt or another run do not count. Writes
    control/refreshed/vN.json at the end. `publish_s` is only reported. `check` is called while waiting, and may raise.

    An instance that the supervisor replaces meanwhile is waited for, and answers as the old one would have; one that it gave
    up is not (`stages.weights.patience`).

    Raises WeightRefreshError naming the instances: one refused, answered wrongly, fell silent (rollout.heartbeat_timeout_s)
    or did not answer in time (weights.refresh_timeout_s, plus what starting a server may take where one has to start).
    """
    run, config = context.run, context.config
    request = _request(run, config, manifest, instances)
    make_directory(run.acks(manifest.version))
    started_s = time.monotonic()
    run.write(run.request_json(manifest.version), request.to_record())
    patience = Patience(run, config, request.instances, request.deadline_s)
    acks = _Acks(run, config, manifest, request, patience)

    def look_around() -> None:
        context.check_stop()
        if check is not None:
            check()
        patience.check(acks.missing())

    try:
        loaded = wait_for(
            acks.look, deadline_s=math.inf, awaited="all ACKs", from_whom="the instances", check=look_around
        )
    except WaitTimeoutError as late:
        raise WeightRefreshError(manifest.version, acks.missing(), acks.lateness(late.waited_s)) from late
    except InstanceSilentError as silent:
        raise WeightRefreshError(manifest.version, (silent.instance,), str(silent)) from silent
    result = _result(manifest, request, loaded, time.monotonic() - started_s, publish_s)
    run.write(run.refreshed_json(manifest.version), result.to_record())
    return result


def _request(run: RunDir, config: LibraConfig, manifest: Manifest, instances: Sequence[str]) -> RefreshRequest:
    return RefreshRequest(
        version=manifest.version,
        path=str(run.weights_version(manifest.version).relative_to(run.root)),
        digest=manifest.digest,
        method=config.rollout_weight_reload_method,
        strategy=config.rollout_weight_reload_strategy,
        instances=tuple(sorted(set(instances))),
        deadline_s=_deadline_s(run, config, instances),
        time=time.time(),
    )


def _deadline_s(run: RunDir, config: LibraConfig, instances: Sequence[str]) -> float:
    """Loading time, and where a server has yet to start (a new instance, method restart) what that may take."""
    statuses = read_statuses(run)
    starting = any(name not in statuses or statuses[name].state == "starting" for name in instances)
    restart = config.rollout_weight_reload_method == "restart"
    serial = restart and config.rollout_weight_reload_strategy == "serial"
    starts = int(starting) + (len(instances) if serial else int(restart))
    return config.weights.refresh_timeout_s + starts * (config.rollout.ready_timeout_s + config.rollout.stop_timeout_s)


@dataclass
class _Acks:
    """What has been answered so far; every record is read and checked once."""

    run: RunDir
    config: LibraConfig
    manifest: Manifest
    request: RefreshRequest
    patience: Patience
    loaded: dict[str, Loaded] = field(default_factory=dict)
    prepared: dict[str, Prepared] = field(default_factory=dict)

    def look(self) -> dict[str, Loaded] | None:
        """List the answers once. All ACKs when they are complete, else None; raises WeightRefreshError for a refusal."""
        names = set(list_names(self.run.acks(self.request.version)))
        for instance in self.missing():
            if f"{instance}.nack.json" in names:
                self._refuse(instance)
            if instance not in self.prepared and f"{instance}.prepared.json" in names:
                self._take(instance, "prepared", Prepared, self.prepared)
            if instance in self.prepared and f"{instance}.loaded.json" in names:
                self._take(instance, "loaded", Loaded, self.loaded)
        return None if self.missing() else self.loaded

    def missing(self) -> tuple[str, ...]:
        awaited = (name for name in self.request.instances if self.patience.is_awaited(name))
        return tuple(name for name in awaited if name not in self.loaded)

    def lateness(self, waited_s: float) -> str:
        states = ", ".join(
            f"{name}: {'prepared, not loaded' if name in self.prepared else 'no answer'}" for name in self.missing()
        )
        return f"no ACK within {waited_s:.1f} s ({states}; limit: weights.refresh_timeout_s)"

    def _refuse(self, instance: str) -> None:
        nack = self._read(instance, "nack", Nack)
        if nack is None or (nack.serving_version < 0 and self.patience.is_replaced_after(instance)):
            return  # in the second case it ends, and its replacement loads the version from the start
        tensor = f"tensor {nack.tensor}: " if nack.tensor else ""
        reason = f"refused in phase {nack.phase}: {tensor}{nack.error} (it serves version {nack.serving_version})"
        raise WeightRefreshError(self.request.version, (instance,), reason)

    def _take(self, instance: str, phase: str, kind: type[Answer], into: dict[str, Answer]) -> None:
        answer = self._read(instance, phase, kind)
        if answer is not None:
            into[instance] = answer

    def _read(self, instance: str, phase: str, kind: type[Answer]) -> Answer | None:
        """A checked answer of this attempt, or None. Raises WeightRefreshError naming the field that is wrong."""
        what = f"{phase} of {instance} for version {self.request.version}"
        try:
            record = self.run.read(self.run.ack_json(self.request.version, instance, phase))
            if record is None:
                return None
            answer = kind.from_record(record, what)
            self._compare(what, {**asdict(answer), "writer": record["writer"]}, instance)
        except (RecordError, ValueError) as problem:
            raise WeightRefreshError(self.request.version, (instance,), f"wrong answer: {problem}") from problem
        return answer

    def _compare(self, what: str, answer: dict[str, Any], instance: str) -> None:
        """Every field that the request or the manifest determines must equal it."""
        wanted = {
            "writer": instance,
            "instance": instance,
            "version": self.request.version,
            "digest": self.request.digest,
            "method": self.request.method,
            "strategy": self.request.strategy,
            "bytes": self.manifest.weight_bytes,
        }
        for name in wanted.keys() & answer.keys():
            if answer[name] != wanted[name]:
                raise RecordError(what, name, f"wanted {wanted[name]!r}, got {answer[name]!r}")
        if "proof" in answer:
            tokens, tolerance = len(self.manifest.probe.logprobs), self.config.weights.proof_tolerance
            if answer["proof"]["tokens"] != tokens:
                raise RecordError(what, "proof.tokens", f"wanted {tokens}, got {answer['proof']['tokens']}")
            if answer["proof"]["tolerance"] > tolerance:
                got = answer["proof"]["tolerance"]
                raise RecordError(what, "proof.tolerance", f"wanted at most {tolerance}, got {got}")


def _result(
    manifest: Manifest, request: RefreshRequest, loaded: dict[str, Loaded], refresh_s: float, publish_s: float
) -> RefreshResult:
    slowest = max(loaded.values(), key=lambda ack: ack.total_reload_s)
    parts = {name: getattr(slowest, name) for name in ("instance", "host", "total_reload_s", *PARTS)}
    return RefreshResult(manifest.version, manifest.digest, refresh_s, publish_s, parts, tuple(sorted(loaded)))
