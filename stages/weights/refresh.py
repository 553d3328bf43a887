"""The trainer's side of the protocol: ask all instances to serve a version, and believe only complete, equal answers.

An instance that refuses is asked again. One that refuses for good, falls silent or is late is quarantined: it gets no prompts
(`stages.controller.instances`) until it has proved the version or a newer one. The run goes on while the least number of
instances that it needs has proved the version.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stages.context import StageContext
from stages.files import make_directory, wait_for
from stages.weights.acks import Acks
from stages.weights.deadlines import Before, read_before, refresh_deadline_s, slowest_bytes_per_s
from stages.weights.errors import InstanceLateError, WeightRefreshError
from stages.weights.instances import InstanceStatus, read_statuses
from stages.weights.manifest import Manifest
from stages.weights.patience import Patience
from stages.weights.records import PARTS, Loaded, Nack, RefreshRequest

RETRY_PAUSES_S = (0.5, 2.0)
"""After so many seconds each an instance that refused, and goes on, is asked again: files may become visible or readable late."""


@dataclass(frozen=True)
class RefreshResult:
    """`refresh_s` from the writing of the request to the last valid ACK; `slowest` names that instance and its parts.

    `instances` are those that proved the version; `quarantined` says why the others did not. `slowest_bytes_per_s` is what the
    next refresh's deadline follows from.
    """

    version: int
    digest: str
    method: str
    refresh_s: float
    publish_s: float
    deadline_s: float
    slowest_bytes_per_s: float
    slowest: dict[str, Any]
    instances: tuple[str, ...]
    quarantined: dict[str, str] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


def request_refresh(
    context: StageContext,
    manifest: Manifest,
    instances: Sequence[str],
    publish_s: float,
    check: Callable[[], None] | None = None,
) -> RefreshResult:
    """Ask `instances` (the complete set) to serve the version of `manifest`, and wait until enough have proved it.

    Enough are all, and where rollout.min_instances says so at least that many, once none is left that may still answer in
    time. Every field of every ACK is checked; ACKs of an older attempt or another run do not count. Writes
    control/refreshed/vN.json at the end. `publish_s` is only reported. `check` is called while waiting, and may raise.

    An instance that the supervisor replaces meanwhile is waited for where it is needed, and answers as the old one would
    have; one that it gave up is not (`stages.weights.patience`).

    Raises WeightRefreshError naming the instances: too many refused, fell silent (rollout.heartbeat_timeout_s) or did not
    answer in time (`stages.weights.deadlines`), or one gave an answer that no sound instance gives.
    """
    run, version = context.run, manifest.version
    names = tuple(sorted(set(instances)))
    before, statuses = read_before(run, context.config, version), read_statuses(run, names)
    request = _request(context, manifest, names, before, statuses)
    make_directory(run.acks(version))
    started_s = time.monotonic()
    run.write(run.request_json(version), request.to_record(), flush=run.flush_exchange)
    patience = Patience(run, context.config, names, request.deadline_s, statuses=statuses)
    patience.away.update(_still_quarantined(before, statuses))
    asking = _Asking(context, manifest, Acks(run, context.config, manifest, request), patience)

    def look_around() -> None:
        context.check_stop()
        if check is not None:
            check()
        asking.judge()

    loaded = wait_for(
        asking.look, deadline_s=math.inf, awaited="all ACKs", from_whom="the instances", check=look_around
    )
    result = _result(manifest, request, loaded, before, time.monotonic() - started_s, publish_s)
    result = replace(result, quarantined=asking.quarantined())
    run.write(run.refreshed_json(version), result.to_record(), flush=run.flush_exchange)
    _tell(context, result, before)
    return result


def _request(
    context: StageContext,
    manifest: Manifest,
    names: tuple[str, ...],
    before: Before,
    statuses: Mapping[str, InstanceStatus],
) -> RefreshRequest:
    run, config = context.run, context.config
    is_starting = any(name not in statuses or statuses[name].state == "starting" for name in names)
    return RefreshRequest(
        version=manifest.version,
        path=str(run.weights_version(manifest.version).relative_to(run.root)),
        digest=manifest.digest,
        method=config.rollout_weight_reload_method,
        strategy=config.rollout_weight_reload_strategy,
        instances=names,
        deadline_s=refresh_deadline_s(
            config, context.plan, manifest.weight_bytes, before.slowest_bytes_per_s, is_starting=is_starting
        ),
        time=time.time(),
    )


def _still_quarantined(before: Before, statuses: Mapping[str, InstanceStatus]) -> dict[str, str]:
    """Of the instances that missed the version before, those that have not proved it since."""
    behind = (name for name in before.quarantined if name not in statuses or statuses[name].version < before.version)
    return {name: f"instance {name} has not proved version {before.version} either" for name in behind}


@dataclass
class _Asking:
    """One refresh under way: who has proved, who may still, who is out and why."""

    context: StageContext
    manifest: Manifest
    acks: Acks
    patience: Patience
    _refusals: dict[str, str] = field(default_factory=dict)
    _again_s: dict[str, float] = field(default_factory=dict)

    def look(self) -> dict[str, Loaded] | None:
        """Read new answers. Those of all that proved the version when that is enough, else None."""
        self.acks.look()
        self._answer_refusals()
        if len(self.acks.loaded) < self._needed():
            return None
        awaited = (name for name in self._members() if name not in self.acks.loaded and not self._why_out(name))
        return None if any(name not in self.patience.away for name in awaited) else self.acks.loaded

    def judge(self) -> None:
        """Raises WeightRefreshError as soon as too few are left that may prove the version."""
        self.patience.check([name for name in self.acks.missing() if name not in self._refusals])
        out = [name for name in self._members() if name not in self.acks.loaded and self._why_out(name)]
        if len(self._members()) - len(out) < self._needed():
            raise WeightRefreshError(self.manifest.version, tuple(out), self._reasons(out))

    def quarantined(self) -> dict[str, str]:
        """Why each instance of the run that has not proved the version did not."""
        missing = [name for name in self._members() if name not in self.acks.loaded]
        return {name: self._why_out(name) or self.patience.away[name] for name in missing}

    def _members(self) -> list[str]:
        return [name for name in self.acks.request.instances if name not in self.patience.given_up]

    def _needed(self) -> int:
        members = len(self._members())
        return min(self.context.config.rollout.min_instances or members, members)

    def _why_out(self, name: str) -> str:
        failure = self.patience.failures.get(name)
        return self._refusals.get(name) or ("" if failure is None else str(failure))

    def _reasons(self, out: Sequence[str]) -> str:
        failures = [self.patience.failures[name] for name in out if name not in self._refusals]
        late = [failure for failure in failures if isinstance(failure, InstanceLateError)]
        reasons = [*self._refusals.values(), *(str(failure) for failure in failures if failure not in late)]
        if late:
            waited_s = max(failure.waited_s for failure in late)
            states = ", ".join(f"{failure.instance}: {self.acks.state_of(failure.instance)}" for failure in late)
            limit = "limit: weights.refresh_timeout_s; from measured rates less, down to weights.refresh_floor_s"
            reasons.append(f"no ACK within {waited_s:.1f} s ({states}; {limit})")
        return "; ".join(reasons)

    # ---- refusals --------------------------------------------------------------------------------------------------

    def _answer_refusals(self) -> None:
        """Ask again those that refused and go on, after a pause each; several at once in one writing of the request."""
        for name, nack in list(self.acks.refused.items()):
            if name not in self._again_s:
                self._take_refusal(name, nack)
        now_s = time.monotonic()
        due = [name for name, at_s in self._again_s.items() if at_s <= now_s]
        if due:
            self._ask_again(due)

    def _take_refusal(self, name: str, nack: Nack) -> None:
        retries = self.acks.request.retries.get(name, 0)
        tensor = f"tensor {nack.tensor}: " if nack.tensor else ""
        reason = f"refused in phase {nack.phase}: {tensor}{nack.error} (it serves version {nack.serving_version})"
        if nack.serving_version < 0 and self.patience.is_replaced_after(name):
            # It ends, and its replacement loads the version from the start.
            del self.acks.refused[name]
            self.patience.away.setdefault(name, f"instance {name} {reason}")
        elif nack.serving_version < 0 or retries == len(RETRY_PAUSES_S):
            self._refusals[name] = reason + (f", also when asked again {retries} times" if retries else "")
            del self.acks.refused[name]
        else:
            self._again_s[name] = time.monotonic() + RETRY_PAUSES_S[retries]

    def _ask_again(self, names: Sequence[str]) -> None:
        retries = self.acks.request.retries
        more = {name: retries.get(name, 0) + 1 for name in names}
        self.acks.request = replace(self.acks.request, retries={**retries, **more})
        run, record = self.context.run, self.acks.request.to_record()
        run.write(run.request_json(self.manifest.version), record, flush=run.flush_exchange)
        for name in names:
            del self._again_s[name]
            del self.acks.refused[name]
            self.patience.asked_again(name)


def _result(
    manifest: Manifest,
    request: RefreshRequest,
    loaded: Mapping[str, Loaded],
    before: Before,
    refresh_s: float,
    publish_s: float,
) -> RefreshResult:
    slowest = max(loaded.values(), key=lambda ack: ack.total_reload_s)
    parts = {name: getattr(slowest, name) for name in ("instance", "host", "total_reload_s", *PARTS)}
    return RefreshResult(
        version=manifest.version,
        digest=manifest.digest,
        method=request.method,
        refresh_s=refresh_s,
        publish_s=publish_s,
        deadline_s=request.deadline_s,
        slowest_bytes_per_s=_rate(manifest, loaded, before),
        slowest=parts,
        instances=tuple(sorted(loaded)),
    )


def _rate(manifest: Manifest, loaded: Mapping[str, Loaded], before: Before) -> float:
    """A delta says nothing about how long a version in full takes, which is what deadlines are for."""
    if manifest.delta is not None:
        return before.slowest_bytes_per_s or 0.0
    return slowest_bytes_per_s(loaded.values(), manifest.weight_bytes, before.slowest_bytes_per_s)


def _tell(context: StageContext, result: RefreshResult, before: Before) -> None:
    """Say who fell out and who is back, once each."""
    for name, why in result.quarantined.items():
        if name not in before.quarantined:
            context.recorder.instant("quarantine", version=result.version, instance=name, reason=why)
            print(f"{name} is quarantined at version {result.version}: {why}", flush=True)
    for name in before.quarantined:
        if name in result.instances:
            context.recorder.instant("readmission", version=result.version, instance=name)
            print(f"{name} is back at version {result.version}", flush=True)
