"""Wherever a run is cut off, and whatever of its batches survives: no prompt is trained twice, and none is skipped."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.batches import Batch, Sequence, read_batch, write_batch
from stages.controller.ledger import (
    Ask,
    Batched,
    Dropped,
    Event,
    Finished,
    Issued,
    Ledger,
    LedgerError,
    LedgerState,
    Resumed,
    Trained,
    decode,
    encode,
    read_ledgers,
)
from stages.controller.resume import Position, find_position
from stages.rundir import RunDir

GROUPS_PER_BATCH, TOTAL_STEPS, SYNC_INTERVAL = 2, 5, 2
MOST_IN_FLIGHT = 5


def batch_of(groups: list[int]) -> Batch:
    return Batch.pack(
        Sequence.of_completion([1], [2], [-0.5], [0], reward=0.0, advantage=0.0, group_id=group) for group in groups
    )


@contextmanager
def scratch_run() -> Iterator[RunDir]:
    with tempfile.TemporaryDirectory() as folder:
        yield RunDir.create(Path(folder) / "run")


@dataclass
class Life:
    """A run in which the test decides what happens next, over any number of attempts. Controller and ledger are real.

    `taken` counts the optimizer steps of the trainer, which the controller sees later; it publishes every other version.
    `saved` has the steps of its checkpoints. `synced_bytes` of the ledger file survive whatever happens.
    """

    run: RunDir
    position: Position
    taken: int = 0
    saved: list[int] = field(default_factory=lambda: [0])
    synced_bytes: int = 0

    @classmethod
    def begin(cls, run: RunDir) -> Life:
        return cls(run, find_position(run, 0))

    @property
    def ledger(self) -> Ledger:
        return self.position.ledger

    @property
    def state(self) -> LedgerState:
        return self.ledger.state

    @property
    def path(self) -> Path:
        return self.run.ledger_jsonl(*self.run.ledger_files()[-1])

    # ---- what can happen -----------------------------------------------------------------------------------------

    def issue(self) -> bool:
        state = self.state
        needed = GROUPS_PER_BATCH * TOTAL_STEPS - (state.issued - state.dropped)
        if not needed or len(state.in_flight) >= MOST_IN_FLIGHT:
            return False
        ask = state.next_ask()
        self.ledger.record([Issued(state.issued, ask.prompt, 0, ask.failures)])
        return True

    def end(self, which: int, outcome: str) -> None:
        """One of the groups in flight is answered ("finish", "uniform") or not ("fail")."""
        if not self.state.in_flight:
            return
        group = sorted(self.state.in_flight)[which % len(self.state.in_flight)]
        if outcome == "fail":
            self.ledger.record([Dropped(group, "failed", True)])
            return
        self.ledger.record([Finished(group, 0, 1, 0.0)])
        if outcome == "uniform":
            self.ledger.record([Dropped(group, "uniform", False)])

    def batch(self, *, published: bool) -> bool:
        state = self.state
        step, groups = len(state.batches), sorted(state.waiting)[:GROUPS_PER_BATCH]
        if len(groups) < GROUPS_PER_BATCH or step == TOTAL_STEPS:
            return False
        self.ledger.record([Batched(step, groups)])
        self.ledger.sync()
        self.synced_bytes = self.path.stat().st_size
        if published:
            write_batch(self.run, step, batch_of(groups))
        return True

    def train(self) -> bool:
        """The trainer takes the next batch, but only one that belongs to this attempt."""
        if self.taken == TOTAL_STEPS or read_batch(self.run, self.taken, own=True) is None:
            return False
        self.taken += 1
        if self.taken % SYNC_INTERVAL == 0:
            self.run.write(self.run.latest_json, {"version": self.taken})
        return True

    def see(self) -> bool:
        if self.state.trained_steps == self.taken:
            return False
        self.ledger.record([Trained(self.state.trained_steps)])
        return True

    def save(self) -> None:
        if self.taken > self.saved[-1]:
            self.saved.append(self.taken)

    # ---- the end of an attempt -----------------------------------------------------------------------------------

    def cut(self, lost_bytes: int) -> None:
        """The controller dies; of what it did not sync, the end may be lost, in the middle of a line too."""
        self.ledger.close()
        size = self.path.stat().st_size
        os.truncate(self.path, max(self.synced_bytes, size - lost_bytes))

    def next_attempt(self, lost_batches: set[int], from_older: bool) -> None:
        for step in lost_batches & set(self.run.published_batches()):
            shutil.rmtree(self.run.batch(step))
        if from_older and len(self.saved) > 1:
            self.saved.pop()
        self.run.start_attempt(self.run.attempt + 1)
        self.run = RunDir.open(self.run.root, writer="controller")
        self.taken = self.saved[-1]
        self.run.write(self.run.latest_json, {"version": self.taken})
        self.resume(self.taken)

    def restart(self, further_steps: int) -> None:
        """The controller alone is started again; the trainer goes on meanwhile, and collects what is behind it."""
        for _ in range(further_steps):
            self.train()
        for step in self.run.published_batches():
            if step < self.taken - self.taken % SYNC_INTERVAL:
                shutil.rmtree(self.run.batch(step))
        self.resume(self.position.first_version)

    def resume(self, first_version: int) -> None:
        self.position, self.synced_bytes = find_position(self.run, first_version), 0
        self.synced_bytes = self.path.stat().st_size

    def live_on(self, moves: int = 1000) -> None:
        """Without trouble, to the end of the run or for some moves."""
        for _ in range(moves):
            if not (self.see() or self.train() or self.batch(published=True) or self.issue() or self.state.in_flight):
                return
            self.end(0, "finish")


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What happens, each with a number that says to which group, or how bad."""
    calm = ["issue", "issue", "finish", "finish", "batch", "train", "see", "save", "live on", "fail", "uniform"]
    actions = st.sampled_from([*calm, *calm, "cut off before the batch", "new attempt", "restart"])
    return draw(st.lists(st.tuples(actions, st.integers(0, 2**16)), max_size=60))


def play(life: Life, events: list[tuple[str, int]]) -> None:
    for action, number in events:
        match action:
            case "issue" | "train" | "see" | "save":
                getattr(life, action)()
            case "batch":
                life.batch(published=True)
            case "finish" | "fail" | "uniform":
                life.end(number, action)
            case "live on":
                life.live_on(number % 12)
            case "cut off before the batch":
                if life.batch(published=False):
                    life.cut(number % 60)
                    life.restart(number % 3)
            case "new attempt":
                life.cut(number % 200)
                lost = {step for step in range(TOTAL_STEPS) if number >> step & 1 and number % 3}
                life.next_attempt(lost, from_older=number % 5 == 0)
            case "restart":
                life.cut(number % 60)
                life.restart(number % 3)


@given(events=lives())
@settings(max_examples=4 * settings().max_examples)
def test_no_prompt_is_trained_twice_or_skipped_whatever_is_cut_off_and_lost(events: list[tuple[str, int]]) -> None:
    with scratch_run() as run:
        life = Life.begin(run)
        play(life, events)
        life.live_on()

        state = life.state
        trained = [prompt for step in range(TOTAL_STEPS) for prompt in state.prompts[step]]
        uniform = state.dropped_for.get("uniform", 0)
        assert life.taken == state.trained_steps == TOTAL_STEPS
        assert len(set(trained)) == len(trained) == GROUPS_PER_BATCH * TOTAL_STEPS
        # As in a run that was never cut off: the first prompts of the stream, less those that were no use.
        assert state.next_prompt == len(trained) + uniform
        assert [*state.in_flight, *state.waiting, *state.requeued] == []
        assert read_ledgers(life.run) == state
        life.ledger.close()


@given(events=lives())
def test_what_the_trainer_may_read_is_what_the_ledger_says(events: list[tuple[str, int]]) -> None:
    with scratch_run() as run:
        life = Life.begin(run)
        play(life, events)

        for step in range(TOTAL_STEPS):
            found = read_batch(life.run, step, own=True)
            if found is not None and step >= life.position.first_version:
                assert set(found[0].group_ids.tolist()) == set(life.state.batches[step])
        life.ledger.close()


# ---- single cases ------------------------------------------------------------------------------------------------


def state_after(*events: Event) -> LedgerState:
    state = LedgerState()
    for event in events:
        state.apply(event)
    return state


ASKED = [Issued(group, group, 0, 0) for group in range(6)]


def test_open_prompts_come_first_in_prompt_order_and_the_stream_goes_on_behind_them() -> None:
    state = state_after(
        *ASKED,
        Finished(4, 0, 1, 0.0),
        Finished(0, 0, 1, 0.0),
        Finished(2, 0, 1, 0.0),
        Dropped(1, "failed", True),
        Batched(0, [4]),
        Batched(1, [2]),
        Resumed(1, 0, 1),
    )

    assert [ask.prompt for ask in state.requeued] == [0, 1, 2, 3, 5]
    assert state.next_prompt == 6
    assert (state.in_flight, state.waiting, state.batches) == ({}, {}, {0: [4]})


def test_counters_after_a_resume_are_those_of_the_batches_that_count() -> None:
    state = state_after(*ASKED, Finished(0, 0, 1, 0.0), Batched(0, [0]), Trained(0), Resumed(1, 0, 1))

    assert state.issued - state.dropped == 1
    assert state.trained_steps == 0
    assert state.dropped_for == {"resumed": 5}


def test_a_prompt_that_failed_gets_its_retries_again_but_travels_alone() -> None:
    state = state_after(Issued(0, 0, 0, 0), Dropped(0, "failed", True), Issued(1, 0, 0, 1), Dropped(1, "failed", True))
    state.apply(Issued(2, 0, 0, 2))
    state.apply(Resumed(1, 0, 0))

    assert state.next_ask() == Ask(0, 1)


def test_a_resume_beyond_what_the_ledger_knows_is_refused() -> None:
    with pytest.raises(LedgerError):
        state_after(Resumed(1, 2, 2))


def test_the_event_survives_the_file() -> None:
    assert decode(encode(Resumed(3, 10, 12))) == Resumed(3, 10, 12)


def test_a_missing_ledger_file_is_named(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")

    with pytest.raises(LedgerError, match=r"goes on from step 10, but .*ledger knows of 0 batches: a file is missing"):
        find_position(run, 10)


def test_each_start_of_a_controller_has_a_file_of_its_own(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    for _ in range(2):
        find_position(run, 0).ledger.close()
    run.start_attempt(1)
    find_position(RunDir.open(run.root, writer="controller"), 0).ledger.close()

    assert run.ledger_files() == [(0, 0), (0, 1), (1, 0)]
    assert sorted(os.listdir(run.ledger)) == ["attempt_000.1.jsonl", "attempt_000.jsonl", "attempt_001.jsonl"]


def recorded_run(tmp_path: Path, steps: int) -> RunDir:
    """An attempt that wrote batches 0 .. steps - 1, of one group each, and trained none."""
    run = RunDir.create(tmp_path / "run")
    life = Life.begin(run)
    for step in range(steps):
        life.issue()
        life.end(0, "finish")
        life.ledger.record([Batched(step, [step])])
        write_batch(run, step, batch_of([step]))
    life.ledger.close()
    run.start_attempt(1)
    return RunDir.open(run.root, writer="controller")


def test_a_damaged_batch_and_those_behind_it_are_made_anew_and_the_first_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run(tmp_path, steps=4)
    path = run.batch(1) / "batch.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")

    position = find_position(run, 0)

    assert sorted(position.manifests) == [0]
    assert [ask.prompt for ask in position.ledger.state.requeued] == [1, 2, 3]
    assert "batch 1 is made anew" in capsys.readouterr().out
    assert [step for step in range(4) if read_batch(run, step, own=True)] == [0]
    position.ledger.close()


def test_a_batch_of_another_line_of_training_is_not_taken_over(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=2)
    older = RunDir(run.root, run.run_id, run.attempt, "test")
    write_batch(older, 1, batch_of([77]))

    position = find_position(run, 0)

    assert sorted(position.manifests) == [0]
    position.ledger.close()


def test_a_batch_that_is_taken_over_stays_as_it_is(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=1)
    before = read_batch(run, 0)
    assert before is not None
    assert read_batch(run, 0, own=True) is None

    position = find_position(run, 0)

    after = read_batch(run, 0, own=True)
    assert after is not None
    assert after[1].xxh3_128 == before[1].xxh3_128
    assert position.manifests[0].extra == {}
    position.ledger.close()
