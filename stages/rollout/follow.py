"""The agent's life after its server is up: look for requests, carry out the newest, repeat what the trainer asks again."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from stages.context import StageContext
from stages.desired import replaceable
from stages.orphaned import SupervisorWatch
from stages.rollout.agent import ServerKeeper
from stages.rollout.errors import RefusedAgainError
from stages.rollout.refresh import Refresh
from stages.rollout.registration import Registration
from stages.weights.apply import Requests, write_loaded, write_prepared
from stages.weights.filesystems import is_local, lies_on_a_disk_here
from stages.weights.records import Loaded, Prepared, RefreshRequest

_POLL_FIRST_S = 0.005
_POLL_LAST_S = 0.05
_POLL_LOCAL_S = 0.01
_POLL_SHARE = 0.02
"""A request is looked for every 2 % of the time since the last one, within two limits; a filesystem of this host is asked more often."""
_LOOKS_PER_S = 1000.0
"""Of all instances together, at most: each look is a listing that a file server has to answer."""
MOST_REFUSED = 2
"""So many versions refused one after another end an instance that is started again then: that may cure what is wrong with it."""


def follow_requests(context: StageContext, keeper: ServerKeeper, registration: Registration) -> NoReturn:
    """Apply every request for a version newer than the one served; leaves only by an exception.

    Raises RefusedAgainError, and what `Refresh.apply` raises.
    """
    follower = Follower(context, keeper, registration)
    since_s, supervisor = time.monotonic(), SupervisorWatch.of(context)
    longest_s = longest_pause_s(context.run.root, len(context.plan.rollout.instances))
    is_in_place = context.config.rollout_weight_reload_method == "inplace"
    reads_ahead = is_in_place and lies_on_a_disk_here(context.run.weights)  # elsewhere no trainer tells what is whole
    while True:
        supervisor.look()
        if follower.step():
            since_s = time.monotonic()
        elif reads_ahead:
            keeper.reader.look_ahead(registration.status.version)
        idle_s = time.monotonic() - since_s
        keeper.pause(min(longest_s, max(_POLL_FIRST_S, _POLL_SHARE * idle_s)))


def longest_pause_s(folder: Path, num_instances: int) -> float:
    """Between two looks for a request in `folder`, of each of so many instances."""
    return max(_POLL_LOCAL_S if is_local(folder) else _POLL_LAST_S, num_instances / _LOOKS_PER_S)


@dataclass
class Follower:
    """What this instance has done about requests so far."""

    context: StageContext
    keeper: ServerKeeper
    registration: Registration
    _requests: Requests = field(init=False)
    _handled: tuple[int, float] = field(init=False)
    _answers: tuple[Prepared, Loaded] | None = None
    _refused: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._requests = Requests(self.context.run, self.context.name)
        # The version that it was started with is not asked for again.
        self._handled = (self.registration.status.version, math.inf)

    def step(self) -> bool:
        """Look once; False when there was nothing to do."""
        version, retry = self._handled
        request = self._requests.newest(version - 1)
        if request is None or (request.version, self._retry(request)) <= (version, retry):
            return False
        if self._answers is not None and request.version == self._answers[1].version:
            self._repeat()
        else:
            self._apply(request)
        self._handled = (request.version, self._retry(request))
        return True

    def _retry(self, request: RefreshRequest) -> int:
        return request.retries.get(self.context.name, 0)

    def _repeat(self) -> None:
        """The version is served already, and proved: only the answers are wanted once more."""
        assert self._answers is not None
        prepared, loaded = self._answers
        write_prepared(self.context.run, prepared)
        write_loaded(self.context.run, loaded)

    def _is_superseded(self, request: RefreshRequest) -> bool:
        return self._requests.newest(request.version) is not None

    def _apply(self, request: RefreshRequest) -> None:
        refresh = Refresh(self.context, self.keeper, self.registration, request, self._is_superseded)
        self._answers = refresh.apply()
        self.context.recorder.counter("version", self.registration.status.version)
        if self._answers is not None:
            self._refused.clear()
        elif refresh.was_refused and request.version not in self._refused:
            self._refused.append(request.version)
            if len(self._refused) >= MOST_REFUSED and self.context.name in replaceable(self.context.run):
                versions = " and ".join(map(str, self._refused))
                raise RefusedAgainError(
                    f"{self.context.name} refused versions {versions}, one after another: it ends, to be started again"
                )
