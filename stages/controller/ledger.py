"""The prompt ledger: one line for everything that happens to a group of trajectories.

All counters of the controller are a fold over these events (`LedgerState.apply`), live and when the files are read back,
so they can not drift from what the files say. A group is issued once, then dropped or (finished, batched, trained); a
dropped group's prompt is asked again under a new group number unless the drop says otherwise.

Every start of a controller writes a file of its own; its first event says from where it goes on (`Resumed`), unless it is the
first of the run. The state of a run is the fold over all of them in order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from stages.rundir import RunDir


class LedgerError(ValueError):
    """An event that can not follow the events before it, or a line that is none."""


@dataclass(frozen=True)
class Issued:
    """A request for `group` leaves; `version` is the one that is served, `failures` how often this prompt failed."""

    group: int
    prompt: int
    version: int
    failures: int


@dataclass(frozen=True)
class Finished:
    group: int
    oldest_version: int
    response_tokens: int
    reward: float


@dataclass(frozen=True)
class Dropped:
    """`reason`: "failed" (request failed), "timeout" (given up because the batch did not fill in time), "interrupted"
    (server was being reloaded), "stale", "uniform".

    `requeued`: the prompt is asked again. Only "failed" and "timeout" count against the prompt.
    """

    group: int
    reason: str
    requeued: bool


@dataclass(frozen=True)
class Batched:
    """Written before the batch of `step` is published."""

    step: int
    groups: list[int]


@dataclass(frozen=True)
class Trained:
    """The trainer's receipt for `step` was seen."""

    step: int


@dataclass(frozen=True)
class Resumed:
    """Attempt `attempt` goes on: `step` steps count as trained, the batches below `batches` are there and are kept.

    Every other prompt that was asked and not thrown away for good is asked again, in prompt order: those in flight, those
    finished without a batch, those of later batches. Their groups count as dropped for "resumed".
    """

    attempt: int
    step: int
    batches: int


Event = Issued | Finished | Dropped | Batched | Trained | Resumed
BLAMED = ("failed", "timeout")
LOST = "resumed"
_KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (Issued, Finished, Dropped, Batched, Trained, Resumed)
}


@dataclass(frozen=True)
class Ask:
    """A prompt that may be asked next."""

    prompt: int
    failures: int


@dataclass
class LedgerState:
    """`issued` and `dropped` are cumulative. `in_flight` and `waiting` map groups to what was asked.

    `batches` has the groups of each batch, `prompts` what those were asked, in the same order.
    """

    attempt: int = 0
    issued: int = 0
    dropped: int = 0
    next_prompt: int = 0
    in_flight: dict[int, Ask] = field(default_factory=dict)
    waiting: dict[int, Ask] = field(default_factory=dict)
    requeued: list[Ask] = field(default_factory=list)
    batches: dict[int, list[int]] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    trained_steps: int = 0
    dropped_for: dict[str, int] = field(default_factory=dict)

    def next_ask(self) -> Ask:
        """Re-queued prompts first, in the order of their return, then the task's stream."""
        return self.requeued[0] if self.requeued else Ask(self.next_prompt, 0)

    def apply(self, event: Event) -> None:
        """Raises LedgerError when `event` contradicts the state."""
        match event:
            case Issued():
                self._issue(event)
            case Finished():
                self.waiting[event.group] = self._leave(self.in_flight, event)
            case Dropped():
                self._drop(event)
            case Batched():
                self._batch(event)
            case Trained():
                self._expect(event.step == self.trained_steps and event.step in self.batches, event)
                self.trained_steps += 1
            case Resumed():
                self._resume(event)

    def _issue(self, event: Issued) -> None:
        ask = Ask(event.prompt, event.failures)
        self._expect(event.group == self.issued and ask == self.next_ask(), event)
        if self.requeued:
            self.requeued.pop(0)
        else:
            self.next_prompt += 1
        self.issued += 1
        self.in_flight[event.group] = ask

    def _drop(self, event: Dropped) -> None:
        ask = self._leave(self.in_flight if event.group in self.in_flight else self.waiting, event)
        self.dropped += 1
        self.dropped_for[event.reason] = self.dropped_for.get(event.reason, 0) + 1
        if event.requeued:
            self.requeued.append(Ask(ask.prompt, ask.failures + (event.reason in BLAMED)))

    def _batch(self, event: Batched) -> None:
        self._expect(event.step == len(self.batches), event)
        prompts = []
        for group in event.groups:
            self._expect(group in self.waiting, event)
            prompts.append(self.waiting.pop(group).prompt)
        self.batches[event.step], self.prompts[event.step] = event.groups, prompts

    def _resume(self, event: Resumed) -> None:
        self._expect(event.attempt >= self.attempt and event.step <= event.batches <= len(self.batches), event)
        # New servers: a prompt that failed on the old ones may fail as often again, but still travels alone.
        lost = [Ask(ask.prompt, min(ask.failures, 1)) for ask in (*self.in_flight.values(), *self.waiting.values())]
        for step in range(event.batches, len(self.batches)):
            lost += [Ask(prompt, 0) for prompt in self.prompts.pop(step)]
            del self.batches[step]
        self.attempt, self.trained_steps = event.attempt, event.step
        self.in_flight, self.waiting = {}, {}
        self.dropped += len(lost)
        if lost:
            self.dropped_for[LOST] = self.dropped_for.get(LOST, 0) + len(lost)
        self.requeued = sorted([*self.requeued, *lost], key=lambda ask: ask.prompt)

    def _leave(self, groups: dict[int, Ask], event: Finished | Dropped) -> Ask:
        self._expect(event.group in groups, event)
        return groups.pop(event.group)

    def _expect(self, holds: bool, event: Event) -> None:
        if not holds:
            raise LedgerError(f"{event} can not follow what the ledger says")


class Ledger:
    """Appends events to one file and keeps the state they add up to, on top of `state`, that of the files before it.

    One writer; without a path it only keeps the state. Raises FileExistsError when the file exists.
    """

    def __init__(self, path: Path | None, state: LedgerState | None = None) -> None:
        self.state = state or LedgerState()
        self._fd = -1 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)

    def record(self, events: Iterable[Event]) -> None:
        """Apply and append: one write for all of `events`."""
        lines = []
        for event in events:
            self.state.apply(event)
            lines.append(encode(event))
        data = "".join(lines).encode()
        if data and self._fd >= 0 and os.write(self._fd, data) != len(data):
            raise OSError("the ledger could not be written completely (is the disk full?)")

    def sync(self) -> None:
        """Make everything recorded so far survive a crash of the node; before a batch is published."""
        if self._fd >= 0:
            os.fsync(self._fd)

    def close(self) -> None:
        self.sync()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def encode(event: Event) -> str:
    """One JSON line."""
    return json.dumps({"event": type(event).__name__.lower(), **vars(event)}) + "\n"


def decode(line: str) -> Event:
    """Inverse of `encode`. Raises LedgerError."""
    try:
        record: dict[str, Any] = json.loads(line)
        return _KINDS[record.pop("event")](**record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"not a ledger line: {line.strip()[:200]!r} ({error})") from error


def read_ledger(path: Path, state: LedgerState | None = None) -> LedgerState:
    """What the events in `path` make of `state` (changed in place). A last line without its end (a killed writer) is ignored.

    Raises LedgerError for any other damage.
    """
    state = state or LedgerState()
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            state.apply(decode(line))
    return state


def read_ledgers(run: RunDir) -> LedgerState:
    """The state that all ledger files of a run add up to. Raises LedgerError naming the file."""
    state = LedgerState()
    for attempt, restart in run.ledger_files():
        path = run.ledger_jsonl(attempt, restart)
        try:
            read_ledger(path, state)
        except LedgerError as error:
            raise LedgerError(f"{path}: {error}") from error
    return state
