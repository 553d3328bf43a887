"""Which version generated which token: arithmetic of segments, the timeline, and the log that vLLM's outputs pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.rollout.compat import SegmentLog
from stages.rollout.versions import VersionTimeline, segments


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int]:
    """Boundaries, final version and length of a sequence that lived through some switches of rising versions."""
    counts = draw(st.lists(st.integers(0, 20), max_size=6))
    first = draw(st.integers(0, 5))
    boundaries, done = [], 0
    for index, count in enumerate(counts):
        done += count
        boundaries.append((first + index, done))
    return boundaries, first + len(counts), done + draw(st.integers(0, 20))


@given(lives())
def test_segments_cover_every_token_once_and_in_rising_versions(life: tuple[list[tuple[int, int]], int, int]) -> None:
    boundaries, final_version, num_tokens = life

    found = segments(boundaries, final_version, num_tokens)

    assert sum(length for _, length in found) == num_tokens
    assert all(length > 0 for _, length in found)
    versions = [version for version, _ in found]
    assert versions == sorted(set(versions))


@given(lives(), st.integers(0, 200))
def test_a_token_belongs_to_the_first_boundary_beyond_it(
    life: tuple[list[tuple[int, int]], int, int], index: int
) -> None:
    boundaries, final_version, num_tokens = life
    if index >= num_tokens:
        return

    flat = [version for version, length in segments(boundaries, final_version, num_tokens) for _ in range(length)]

    assert flat[index] == next((version for version, until in boundaries if index < until), final_version)


def test_segments_refuse_token_counts_that_run_back() -> None:
    with pytest.raises(ValueError, match="run back"):
        segments([(0, 5), (1, 3)], 2, 9)


def test_the_timeline_gives_the_version_of_a_moment() -> None:
    timeline = VersionTimeline(0)
    timeline.switch(4, 10.0)
    timeline.switch(7, 20.0)

    assert [timeline.at(moment) for moment in (-1.0, 9.99, 10.0, 19.9, 20.0, 1e9)] == [0, 0, 4, 4, 7, 7]
    assert timeline.newest == 7


def test_the_timeline_refuses_a_switch_in_the_past() -> None:
    timeline = VersionTimeline(0)
    timeline.switch(1, 10.0)

    with pytest.raises(ValueError, match="before the last one"):
        timeline.switch(2, 10.0)


def test_the_timeline_keeps_a_bounded_past() -> None:
    timeline = VersionTimeline(0)
    for version in range(1, 1000):
        timeline.switch(version, float(version))

    assert timeline.at(999.5) == 999
    assert timeline.at(998.5) == 998
    assert len(timeline._begins) < 100


# ---- the log, on a stand-in for vLLM's output processor --------------------------------------------------------------


@dataclass
class Detokenizer:
    token_ids: list[int] = field(default_factory=list)

    def num_output_tokens(self) -> int:
        return len(self.token_ids)


@dataclass
class State:
    request_id: str
    external_req_id: str
    request_index: int
    detokenizer: Detokenizer | None = field(default_factory=Detokenizer)


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int]
    finished: bool = False


class Processor:
    def __init__(self, *states: State) -> None:
        self.request_states = {state.request_id: state for state in states}

    def process_outputs(self, outputs: list[Output], timestamp: float, *more: Any) -> int:
        for output in outputs:
            state = self.request_states.get(output.request_id)
            if state is not None and state.detokenizer is not None:
                state.detokenizer.token_ids += output.new_token_ids
                if output.finished:
                    del self.request_states[output.request_id]
        return len(outputs)


def child(index: int, prompt: int = 0, base: str = "cmpl-a") -> State:
    return State(f"{index}_{base}-{prompt}-f00", f"{base}-{prompt}", index)


def test_a_sequence_across_two_switches_gets_three_segments() -> None:
    state = child(0)
    processor = Processor(state)
    timeline = VersionTimeline(0)
    log = SegmentLog(processor, timeline)
    log.follow("cmpl-a")

    processor.process_outputs([Output(state.request_id, [1, 2, 3])], 1.0, None)
    timeline.switch(1, 2.0)
    processor.process_outputs([Output(state.request_id, [4])], 3.0, None)
    timeline.switch(2, 4.0)
    processor.process_outputs([Output(state.request_id, [5, 6], finished=True)], 5.0, None)

    assert log.take("cmpl-a") == [[[0, 3], [1, 1], [2, 2]]]


def test_outputs_made_before_a_switch_but_seen_after_it_belong_to_the_old_version() -> None:
    state = child(0)
    processor = Processor(state)
    timeline = VersionTimeline(0)
    log = SegmentLog(processor, timeline)
    log.follow("cmpl-a")

    timeline.switch(1, 2.0)
    processor.process_outputs([Output(state.request_id, [1, 2])], 1.9, None)
    processor.process_outputs([Output(state.request_id, [3], finished=True)], 2.1, None)

    assert log.take("cmpl-a") == [[[0, 2], [1, 1]]]


def test_choices_come_prompt_by_prompt_and_sample_by_sample() -> None:
    states = [child(index, prompt) for prompt in range(11) for index in range(2)]
    processor = Processor(*states)
    log = SegmentLog(processor, VersionTimeline(3))
    log.follow("cmpl-a")

    for length, state in reversed(list(enumerate(states, start=1))):
        processor.process_outputs([Output(state.request_id, [0] * length, finished=True)], 1.0)

    assert log.take("cmpl-a") == [[[3, length]] for length in range(1, 23)]


def test_requests_that_nobody_follows_leave_nothing_behind() -> None:
    state, gone = child(0), child(1)
    processor = Processor(state, gone)
    timeline = VersionTimeline(0)
    log = SegmentLog(processor, timeline)

    processor.process_outputs([Output(state.request_id, [1]), Output(gone.request_id, [1])], 1.0)
    timeline.switch(1, 2.0)
    processor.process_outputs([Output(state.request_id, [2])], 3.0)
    del processor.request_states[gone.request_id]  # the client left
    timeline.switch(2, 4.0)
    processor.process_outputs([Output(state.request_id, [3], finished=True)], 5.0)

    assert log.take("cmpl-a") == []
    assert log._boundaries == {}


def test_the_wrapped_method_gets_and_gives_what_it_did_before() -> None:
    processor = Processor(child(0))
    SegmentLog(processor, VersionTimeline(0))

    assert processor.process_outputs([Output("unknown", [1])], 1.0, "statistics") == 1
