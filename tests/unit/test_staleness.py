"""Whatever order things happen in: nothing too stale is consumed, nothing waits for ever, little is thrown away."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import LibraConfig
from stages.controller.groups import Completion, FinishedGroup, Prompt, WaitingGroups
from stages.controller.ledger import Batched, Dropped, Finished, Issued, LedgerState, Trained
from stages.controller.staleness import Bounds, UnusableBoundsError, capacity, staleness
from stages.controller.tasks.base import Problem


def finished(group: int, prompt: int, version: int) -> FinishedGroup:
    completion = Completion([7], [-0.5], [version], True)
    return FinishedGroup(group, Prompt(prompt, Problem("", ""), [1]), [completion], [0.0], 0.0, 1.0)


@dataclass
class Simulation:
    """A run in which the test decides what happens next. The trainer publishes every `sync_interval` steps."""

    bounds: Bounds
    sync_interval: int
    total_steps: int
    served: int = 0
    ledger: LedgerState = field(default_factory=LedgerState)
    waiting: WaitingGroups = field(default_factory=WaitingGroups)
    consumed: list[int] = field(default_factory=list)  # staleness of every group that a batch took
    wasted: int = 0

    def issue(self, most: int) -> None:
        state = self.ledger
        room = capacity(
            self.bounds,
            served_version=self.served,
            issued=state.issued,
            dropped=state.dropped,
            in_flight=len(state.in_flight),
        )
        for _ in range(min(room, most)):
            ask = state.next_ask()
            state.apply(Issued(state.issued, ask.prompt, self.served, ask.failures))

    def finish(self, which: int, version: int) -> None:
        """`version` is that of the oldest token: not older than what was served when the group started."""
        group = sorted(self.ledger.in_flight)[which % len(self.ledger.in_flight)]
        prompt = self.ledger.in_flight[group].prompt
        self.ledger.apply(Finished(group, version, 1, 0.0))
        self.waiting.add(finished(group, prompt, version))

    def fail(self, which: int) -> None:
        group = sorted(self.ledger.in_flight)[which % len(self.ledger.in_flight)]
        self.ledger.apply(Dropped(group, "failed", True))

    def take(self) -> None:
        step = len(self.ledger.batches)
        if step == self.total_steps:
            return
        for group in self.waiting.expire(self.bounds, step):
            self.wasted += 1
            self.ledger.apply(Dropped(group.group, "stale", True))
        groups = self.waiting.take(self.bounds, step)
        if groups is not None:
            self.consumed += [staleness(step, group.oldest_version) for group in groups]
            self.ledger.apply(Batched(step, [group.group for group in groups]))

    def train(self) -> None:
        if self.ledger.trained_steps < len(self.ledger.batches):
            self.ledger.apply(Trained(self.ledger.trained_steps))

    def publish(self) -> None:
        trained = self.ledger.trained_steps
        version = trained if trained == self.total_steps else trained - trained % self.sync_interval
        self.served = max(self.served, version)


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    sync_interval = draw(st.integers(1, 4))
    offpolicyness = draw(st.integers(sync_interval - 1, sync_interval + 2))
    groups, steps = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    bounds = Bounds(groups, offpolicyness, draw(st.integers(1, 10)), groups * steps)
    return Simulation(bounds, sync_interval, steps)


def play(simulation: Simulation, data: st.DataObject) -> None:
    """A random interleaving; groups keep the version they started with until they finish."""
    started: dict[int, int] = {}
    for _ in range(data.draw(st.integers(0, 120))):
        action = data.draw(st.sampled_from(["issue", "finish", "fail", "take", "train", "publish"]))
        if action == "issue":
            before = set(simulation.ledger.in_flight)
            simulation.issue(data.draw(st.integers(1, 6)))
            started |= dict.fromkeys(set(simulation.ledger.in_flight) - before, simulation.served)
        elif action in ("finish", "fail"):
            if simulation.ledger.in_flight:
                which = data.draw(st.integers(0, 20))
                group = sorted(simulation.ledger.in_flight)[which % len(simulation.ledger.in_flight)]
                if action == "fail":
                    simulation.fail(which)
                else:
                    simulation.finish(which, data.draw(st.integers(started[group], simulation.served)))
        else:
            getattr(simulation, action)()
        untrained = len(simulation.ledger.batches) - simulation.ledger.trained_steps
        assert untrained <= simulation.bounds.max_head_offpolicyness + 1
        assert len(simulation.ledger.in_flight) <= simulation.bounds.max_groups_in_flight


@settings(deadline=None)  # a shared machine pauses tests at will
@given(simulation=simulations(), data=st.data())
def test_nothing_too_stale_is_consumed_in_any_interleaving(simulation: Simulation, data: st.DataObject) -> None:
    play(simulation, data)

    assert max(simulation.consumed, default=0) <= simulation.bounds.max_head_offpolicyness


@settings(deadline=None)
@given(simulation=simulations(), data=st.data())
def test_the_run_can_always_be_finished_from_any_interleaving(simulation: Simulation, data: st.DataObject) -> None:
    play(simulation, data)

    for _ in range(10 * simulation.bounds.total_groups + 10):
        simulation.issue(100)
        while simulation.ledger.in_flight:
            simulation.finish(0, simulation.served)
        simulation.take()
        simulation.train()
        simulation.publish()

    assert simulation.ledger.trained_steps == simulation.served == simulation.total_steps


@settings(deadline=None)
@given(simulation=simulations(), data=st.data())
def test_every_prompt_is_trained_once_or_still_open(simulation: Simulation, data: st.DataObject) -> None:
    play(simulation, data)

    state = simulation.ledger
    trained = sum(len(groups) for groups in state.batches.values())
    assert trained + len(state.in_flight) + len(state.waiting) + len(state.requeued) == state.next_prompt


@settings(deadline=None)
@given(simulation=simulations())
def test_nothing_is_thrown_away_when_groups_finish_in_order(simulation: Simulation) -> None:
    for _ in range(10 * simulation.bounds.total_groups + 10):
        simulation.issue(100)
        if simulation.ledger.in_flight:
            simulation.finish(0, simulation.served)
        simulation.take()
        simulation.train()
        simulation.publish()

    assert simulation.wasted == 0
    assert simulation.ledger.trained_steps == simulation.total_steps


def test_on_policy_capacity_is_one_batch_for_each_version() -> None:
    bounds = Bounds(groups_per_batch=8, max_head_offpolicyness=0, max_groups_in_flight=100, total_groups=80)

    assert capacity(bounds, served_version=0, issued=0, dropped=0, in_flight=0) == 8
    assert capacity(bounds, served_version=0, issued=8, dropped=0, in_flight=0) == 0
    assert capacity(bounds, served_version=1, issued=8, dropped=0, in_flight=0) == 8


def test_consuming_a_batch_does_not_loosen_the_bound() -> None:
    bounds = Bounds(groups_per_batch=4, max_head_offpolicyness=1, max_groups_in_flight=100, total_groups=1000)

    after_ten_versions = capacity(bounds, served_version=10, issued=44, dropped=0, in_flight=0)

    assert after_ten_versions == 4


def test_no_more_groups_start_than_the_run_needs() -> None:
    bounds = Bounds(groups_per_batch=4, max_head_offpolicyness=5, max_groups_in_flight=100, total_groups=8)

    assert capacity(bounds, served_version=0, issued=6, dropped=1, in_flight=5) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 30, "n_samples": 8}, "batch_size=32"),
        ({"max_concurrent_rollouts": 4, "n_samples": 8}, "raise max_concurrent_rollouts"),
        ({"sync_interval": 3, "max_head_offpolicyness": 1}, "needs at least 2"),
    ],
)
def test_sizes_that_can_not_make_a_batch_are_refused(options: dict[str, int], message: str) -> None:
    config = LibraConfig(**options)  # type: ignore[arg-type]

    with pytest.raises(UnusableBoundsError, match=message):
        Bounds.of(config)
