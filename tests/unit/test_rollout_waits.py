"""How long a refresh waits for workers that read, and for a canary that a busy engine has not come to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stages.rollout import reload
from stages.rollout.errors import UnfitWeightsError
from stages.rollout.orders import Order
from stages.rollout.reload import Reloads
from stages.rundir import RunDir
from stages.weights.manifest import Manifest
from tests.rollout_guard_kit import Answer, FakeEngine, in_loop, run_with_token, settings_of
from tests.weights_kit import publish_full
from traces.recorder import Recorder


@dataclass
class Clock:
    """Goes on by what is slept, and when it is told to."""

    now_s: float = 100.0
    pauses_s: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s


class TimedEngine(FakeEngine):
    """Its workers have read after `reading_s`, or have failed with `error`."""

    def __init__(self, clock: Clock, reading_s: float, error: str = "") -> None:
        super().__init__()
        self._clock, self._reading_s, self._error = clock, reading_s, error
        self._done_s = 0.0

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        if method == "libra_prepare":
            self._done_s = self._clock() + self._reading_s
        if method == "libra_prepared":
            done = self._clock() >= self._done_s
            return [{"done": done, "error": self._error if done else "", "tensor": ""}]
        return await super().call(method, *arguments)

    async def submit(self, token_ids: tuple[int, ...], *, logprobs: bool) -> Awaitable[Answer]:
        if not logprobs and self.seeding is None:
            self.seeding = asyncio.Event()  # the first canary stays in the queue
        return await super().submit(token_ids, logprobs=logprobs)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_with_token(tmp_path / "run")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def order_of(run: RunDir, manifest: Manifest) -> Order:
    path = f"weights/v{manifest.version:06d}"
    return Order(run.run_id, run.attempt, manifest.version, path, manifest.digest, "inplace", 30.0)


def reloads_of(run: RunDir, clock: Clock, engine: FakeEngine) -> Reloads:
    recorder = Recorder(run.traces, "rollout", 0, 1, "rollout_000.server", enabled=False)
    return Reloads(settings_of(run), engine, recorder, clock)


async def prepared(reloads: Reloads, order: Order) -> None:
    await reloads.prepare(order)


class Waits:
    """In place of asyncio in the module: pauses move the clock, waits say how long they would last."""

    def __init__(self, clock: Clock) -> None:
        self.sleep = clock.sleep
        self.timeouts_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def wait(self, tasks: Any, timeout: float) -> Any:
        self.timeouts_s.append(timeout)
        return await asyncio.wait(tasks, timeout=0)


@pytest.fixture
def waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Waits:
    made = Waits(clock)
    monkeypatch.setattr(reload, "asyncio", made)
    return made


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize(("reading_s", "most_lost_s"), [(0.01, 0.002), (0.5, 0.01), (1.0, 0.02), (20.0, 0.02)])
def test_the_end_of_a_reading_is_noticed_within_a_fiftieth_of_its_time(
    run: RunDir, clock: Clock, reading_s: float, most_lost_s: float
) -> None:
    reloads = reloads_of(run, clock, TimedEngine(clock, reading_s))
    order = order_of(run, publish_full(run, 0))
    in_loop(lambda: prepared(reloads, order))

    assert reading_s <= sum(clock.pauses_s) <= reading_s + most_lost_s + 1e-9
    assert min(clock.pauses_s) >= 0.002
    assert max(clock.pauses_s) <= 0.02


@pytest.mark.usefixtures("waits")
def test_workers_that_read_longer_than_the_order_allows_are_given_up(run: RunDir, clock: Clock) -> None:
    reloads = reloads_of(run, clock, TimedEngine(clock, 1e9))
    order = order_of(run, publish_full(run, 0))

    with pytest.raises(UnfitWeightsError, match="not read within 30 s"):
        in_loop(lambda: prepared(reloads, order))

    assert sum(clock.pauses_s) == pytest.approx(30.5, abs=0.05)


@pytest.mark.usefixtures("waits")
def test_why_a_worker_waited_in_vain_is_said_although_it_has_the_same_deadline(run: RunDir, clock: Clock) -> None:
    engine = TimedEngine(clock, 30.2, error="waited 30.0 s for the node's staged weights")
    order = order_of(run, publish_full(run, 0))

    with pytest.raises(UnfitWeightsError, match="staged weights"):
        in_loop(lambda: prepared(reloads_of(run, clock, engine), order))


@pytest.mark.parametrize(("reading_s", "left_s"), [(0.0, 0.25), (0.1, 0.15), (0.25, 0.0), (1.5, 0.0)])
def test_a_canary_has_a_quarter_of_a_second_from_when_it_was_queued(
    run: RunDir, clock: Clock, waits: Waits, reading_s: float, left_s: float
) -> None:
    reloads = reloads_of(run, clock, TimedEngine(clock, reading_s))
    order = order_of(run, publish_full(run, 0))
    answers = []

    async def body() -> None:
        await reloads.prepare(order)
        answers.append(await reloads.commit(order))

    in_loop(body)

    assert waits.timeouts_s == [pytest.approx(left_s, abs=0.006)]
    assert answers[0]["prefix_cache_checked"] is False


def test_a_canary_that_still_waits_is_not_waited_for_again(run: RunDir, clock: Clock, waits: Waits) -> None:
    engine = TimedEngine(clock, 0.1)
    reloads = reloads_of(run, clock, engine)
    orders = [order_of(run, publish_full(run, version)) for version in (0, 1)]

    async def body() -> None:
        for order in orders:
            await reloads.prepare(order)
            await reloads.commit(order)

    in_loop(body)

    assert waits.timeouts_s == [pytest.approx(0.15, abs=0.006), pytest.approx(0.05, abs=0.012)]
    assert engine.log.count("canary") == 1
