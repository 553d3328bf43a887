"""Files found, lines judged, the reference system's records, and clocks put on one line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import Recorder
from traces.chrome import export
from traces.clocks import FlowPoint, causal_shifts
from traces.reader import NoTracesError, find_files, load_file
from traces.report import render
from traces.run import RunTrace
from traces.summary import summarise

SECOND = 1_000_000_000


def line(event: str, rank: int = 0, **fields: Any) -> str:
    base = {"schema": "libra.phase_trace.v1", "rank": rank, "world_size": 2, "event": event, "step": 1, "details": {}}
    return json.dumps({**base, **fields}) + "\n"


class Host:
    """Writes the trace file of one process by hand, with clocks of its own choice (seconds)."""

    def __init__(self, path: Path, boot: str, monotonic_at_0: float, wall_error: float = 0.0) -> None:
        self._path = path
        self._boot = boot
        self._offset_ns = int((1000 + wall_error - monotonic_at_0) * SECOND)
        self._monotonic_at_0 = monotonic_at_0
        self._common: dict[str, Any] = {
            "role": "rollout",
            "name": path.name.split(".")[1],
            "session": f"session {boot}",
            "thread": "MainThread",
        }
        self.anchor(0, "open")

    def anchor(self, at: float, reason: str, wall_step: float = 0.0) -> None:
        monotonic_ns = int((self._monotonic_at_0 + at) * SECOND)
        wall_ns = monotonic_ns + self._offset_ns + int(wall_step * SECOND)
        self._write(
            "anchor", phase="anchor", wall_ns=wall_ns, monotonic_ns=monotonic_ns, offset_ns=self._offset_ns,
            hostname="host", boot_id=self._boot, pid=1, num_slots=1, dropped=0, reason=reason,
        )  # fmt: skip

    def flow(self, at: float, direction: str, flow_id: str) -> None:
        ts_ns = int((self._monotonic_at_0 + at) * SECOND) + self._offset_ns
        self._write("flow", phase="version", ts_ns=ts_ns, flow=direction, flow_id=flow_id, span_id=None)

    def _write(self, event: str, **fields: Any) -> None:
        with self._path.open("a") as file:
            file.write(line(event, **self._common, **fields))


def flow_times(run: RunTrace) -> dict[str, float]:
    """Seconds since the run's start of each flow event, by process and direction."""
    return {
        f"{process.name} {point.kind}": round((point.ts_ns - run.start_ns) / SECOND, 6)
        for process in run.processes()
        for point in process.points
    }


def test_all_attempts_of_a_run_are_found_and_numbered(tmp_path: Path) -> None:
    for attempt in (0, 1):
        with Recorder(tmp_path / f"attempts/{attempt}/traces", "trainer", 0, 1, "trainer") as recorder:
            recorder.instant("here")

    run = RunTrace(tmp_path)

    assert run.attempts == [0, 1]
    assert [process.attempt for process in run.processes()] == [0, 1]


@pytest.mark.parametrize("where", ["", "deep", "deep/er", "deep/er/*.jsonl", "deep/er/phase_trace_rank0000.a.jsonl"])
def test_a_folder_above_a_file_or_a_pattern_will_do(tmp_path: Path, where: str) -> None:
    Recorder(tmp_path / "deep/er", "trainer", 0, 1, "a").close()

    assert [path.name for path in find_files(tmp_path / where)] == ["phase_trace_rank0000.a.jsonl"]


@pytest.mark.parametrize("where", ["", "missing", "*.jsonl"])
def test_a_place_without_traces_is_named_in_the_error(tmp_path: Path, where: str) -> None:
    with pytest.raises(NoTracesError, match="no traces in"):
        find_files(tmp_path / where)


@pytest.mark.parametrize(
    "bad",
    [
        '{"schema":"libra.phase_trace.v1","rank":0,"ev',
        "not json\n",
        "[1, 2]\n",
        '{"schema":"another"}\n',
        line("phase_span", phase="step", start_ns="soon", end_ns=2),
        line("phase_span", start_ns=1, end_ns=2),
        "\x00\x00\x00\xff\n",
    ],
)
def test_a_line_that_is_no_record_is_skipped_and_counted(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "phase_trace_rank0000.trainer.jsonl"
    good = line("phase_span", phase="step", start_ns=1, end_ns=2)
    path.write_text(good + good + bad)

    process = load_file(path)

    assert (len(process.spans), process.num_bad_lines) == (2, 1)


json_values: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({"a": 1})
)
field_names = [
    "ts_ns",
    "start_ns",
    "end_ns",
    "step",
    "version",
    "phase",
    "span_id",
    "parent_id",
    "session",
    "details",
    "value",
]
damaged_records = st.fixed_dictionaries(
    {
        "event": st.sampled_from(
            ["anchor", "phase_start", "phase_span", "phase_unfinished", "counter", "flow", "instant"]
        )
    },
    optional={
        **dict.fromkeys(
            [*field_names, "rank", "wall_ns", "monotonic_ns", "offset_ns", "dropped", "flow_id"], json_values
        ),
        "flow": st.sampled_from(["start", "step", "end", "sideways"]),
    },
)


@given(st.lists(damaged_records, max_size=6))
def test_no_damage_to_a_record_stops_the_reading_or_spoils_the_export(damaged: list[dict[str, Any]]) -> None:
    good = line("phase_span", phase="step", start_ns=1, end_ns=2, session="whole")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "phase_trace_rank0000.trainer.jsonl"
        path.write_text(good + "".join(line(**{"phase": "p", **record}) for record in damaged))

        run = RunTrace(folder)
        (process,) = run.processes()
        trace = json.loads(export(run, Path(folder) / "trace.json").path.read_text(), parse_constant=pytest.fail)
        render(summarise(run))

    assert [span.end_ns - span.start_ns for span in process.spans if span.session == "whole"] == [1]
    assert any(event["name"] == "step" for event in trace["traceEvents"])


def test_an_empty_file_is_a_process_that_did_nothing(tmp_path: Path) -> None:
    (tmp_path / "phase_trace_rank0000.trainer.jsonl").touch()

    (process,) = RunTrace(tmp_path).processes()

    assert (process.spans, process.num_bad_lines) == ([], 0)


def test_events_of_a_later_revision_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "phase_trace_rank0000.trainer.jsonl"
    path.write_text(line("telepathy", phase="step"))

    assert load_file(path).num_bad_lines == 0


def test_records_of_the_reference_system_are_read(tmp_path: Path) -> None:
    path = tmp_path / "phase_trace_rank5.jsonl"
    path.write_text(
        line("phase_start", 5, phase="step", step=0, ts_ns=100)
        + line("phase_start", 5, phase="collect_batch", step=0, ts_ns=110)
        + line("phase_span", 5, phase="collect_batch", step=0, start_ns=110, end_ns=150, duration_s=4e-8)
        + line("phase_start", 5, phase="step", step=1, ts_ns=200)
        + line("phase_start", 5, phase="grpo_update", step=1, ts_ns=210)
        + line("phase_span", 5, phase="grpo_update", step=1, start_ns=210, end_ns=260, duration_s=5e-8)
    )

    (process,) = RunTrace(tmp_path).processes()

    assert (process.rank, process.role) == (5, "trainer")
    assert [(span.phase, span.start_ns, span.end_ns, span.unfinished) for span in process.spans] == [
        ("step", 100, 200, False),
        ("collect_batch", 110, 150, False),
        ("step", 200, 260, True),
        ("grpo_update", 210, 260, False),
    ]


def test_an_open_phase_lasts_until_the_attempt_ended(tmp_path: Path) -> None:
    hung = Recorder(tmp_path, "trainer", 0, 1, "trainer")
    hung.span("grpo_update").__enter__()
    with Recorder(tmp_path, "controller", 0, 1, "controller") as alive:
        alive.instant("gave up")

    run = RunTrace(tmp_path)
    spans = [span for process in run.processes() for span in process.spans]
    hung.close()

    assert [(span.phase, span.unfinished) for span in spans] == [("grpo_update", True)]
    assert spans[0].end_ns == run.end_ns[0]


def test_processes_of_one_host_are_aligned_by_their_monotonic_clock(tmp_path: Path) -> None:
    """The second process started after the wall clock was set forward by 7 s; the monotonic clock did not move."""
    first = Host(tmp_path / "phase_trace_rank0000.a.jsonl", "boot", 50.0)
    first.anchor(20, "periodic")
    first.flow(1, "start", "1")
    second = Host(tmp_path / "phase_trace_rank0001.b.jsonl", "boot", 50.0, wall_error=7.0)
    second.flow(2, "end", "1")

    run = RunTrace(tmp_path)

    assert flow_times(run) == {"a start": 1.0, "b end": 2.0}
    assert run.start_ns == 1000 * SECOND  # most anchors were read before the wall clock was set
    (clock,) = run.clocks.hosts.values()
    assert (clock.wall_step_ns, clock.shift_ns) == (7 * SECOND, 0)


def test_wall_clocks_of_two_hosts_are_believed_while_messages_allow_it(tmp_path: Path) -> None:
    Host(tmp_path / "phase_trace_rank0000.a.jsonl", "boot a", 50.0).flow(1, "start", "1")
    Host(tmp_path / "phase_trace_rank0001.b.jsonl", "boot b", 9.0, wall_error=0.2).flow(2, "end", "1")

    run = RunTrace(tmp_path)

    assert flow_times(run) == {"a start": 1.0, "b end": 2.2}


def test_messages_both_ways_correct_a_wall_clock_that_contradicts_them(tmp_path: Path) -> None:
    """b is 5 s behind; each message takes 0.1 s, so that the error is known to 0.1 s."""
    a = Host(tmp_path / "phase_trace_rank0000.a.jsonl", "boot a", 50.0)
    b = Host(tmp_path / "phase_trace_rank0001.b.jsonl", "boot b", 9.0, wall_error=-5.0)
    a.flow(1.0, "start", "there")
    b.flow(1.1, "end", "there")
    b.flow(2.0, "start", "back")
    a.flow(2.1, "end", "back")

    run = RunTrace(tmp_path)

    clock = run.clocks.hosts["host boot b"]
    assert (clock.shift_ns, clock.uncertainty_ns) == (5 * SECOND, SECOND // 10)
    assert run.clocks.hosts["host boot a"].shift_ns == 0


def point(key: str, kind: str, ts_ns: int, clock: str) -> FlowPoint:
    return FlowPoint((0, "version", key), kind, ts_ns, clock)


def test_messages_one_way_move_a_clock_just_enough() -> None:
    points = [point("1", "start", 100, "a"), point("1", "end", 40, "b")]

    assert causal_shifts(["a", "b"], points) == {"b": (60, None)}


def test_a_clock_is_placed_through_a_third_one() -> None:
    """c exchanged messages with b only, and b is 60 behind a."""
    points = [
        point("1", "start", 100, "a"),
        point("1", "end", 40, "b"),
        point("2", "start", 45, "b"),
        point("2", "step", 50, "c"),
    ]

    assert causal_shifts(["a", "b", "c"], points) == {"b": (60, None), "c": (55, None)}


def test_a_message_sent_twice_bounds_nothing() -> None:
    points = [point("1", "start", 100, "a"), point("1", "end", 40, "b"), point("1", "start", 10, "a")]

    assert causal_shifts(["a", "b"], points) == {}
