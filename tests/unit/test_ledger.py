"""The prompt ledger: counters are what the file says."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    Trained,
    decode,
    encode,
    read_ledger,
)

LIFE: list[Event] = [
    Issued(0, 0, 0, 0),
    Issued(1, 1, 0, 0),
    Dropped(0, "failed", True),
    Issued(2, 0, 0, 1),
    Finished(1, 0, 12, 0.5),
    Dropped(1, "uniform", False),
    Issued(3, 2, 1, 0),
    Finished(2, 0, 9, 1.0),
    Finished(3, 1, 9, 1.0),
    Batched(0, [2, 3]),
    Trained(0),
]


def test_the_file_adds_up_to_the_live_state(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"

    with Ledger(path) as ledger:
        ledger.record(LIFE[:4])
        ledger.record(LIFE[4:])
        ledger.sync()

    assert read_ledger(path) == ledger.state
    assert (ledger.state.issued, ledger.state.dropped, ledger.state.trained_steps) == (4, 2, 1)


@pytest.mark.parametrize("event", LIFE, ids=lambda event: type(event).__name__)
def test_every_event_survives_the_file(event: Event) -> None:
    assert decode(encode(event)) == event


def test_a_failed_prompt_is_asked_next_and_its_failure_counts() -> None:
    state = LedgerState()

    for event in LIFE[:3]:
        state.apply(event)

    assert state.next_ask() == Ask(prompt=0, failures=1)


def test_a_stale_prompt_is_asked_again_without_blame() -> None:
    state = LedgerState()

    for event in (Issued(0, 0, 0, 0), Finished(0, 0, 5, 0.0), Dropped(0, "stale", True)):
        state.apply(event)

    assert state.next_ask() == Ask(prompt=0, failures=0)


def test_a_uniform_group_is_replaced_by_another_prompt() -> None:
    state = LedgerState()

    for event in (Issued(0, 0, 0, 0), Finished(0, 0, 5, 0.0), Dropped(0, "uniform", False)):
        state.apply(event)

    assert state.next_ask() == Ask(prompt=1, failures=0)


@pytest.mark.parametrize(
    "event",
    [
        Finished(7, 0, 1, 0.0),
        Issued(0, 0, 0, 0),
        Issued(2, 5, 0, 0),
        Batched(1, []),
        Batched(0, [0]),
        Trained(0),
        Dropped(9, "stale", True),
    ],
    ids=str,
)
def test_an_event_that_can_not_follow_is_refused(event: Event) -> None:
    state = LedgerState()
    state.apply(Issued(0, 0, 0, 0))
    state.apply(Issued(1, 1, 0, 0))

    with pytest.raises(LedgerError):
        state.apply(event)


def test_half_a_last_line_of_a_killed_writer_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(encode(LIFE[0]) + encode(LIFE[1])[:9])

    assert read_ledger(path).issued == 1


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(encode(LIFE[0])[:9] + "\n" + encode(LIFE[1]))

    with pytest.raises(LedgerError, match="not a ledger line"):
        read_ledger(path)


def test_an_attempt_never_writes_into_the_ledger_of_another(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path).close()

    with pytest.raises(FileExistsError):
        Ledger(path)
