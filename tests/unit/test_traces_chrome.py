"""The exported file: valid, named, properly nested, with arrows where things went."""

from __future__ import annotations

import asyncio
import gzip
import json
import tempfile
import threading
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import Recorder
from traces.chrome import export
from traces.lanes import Layout
from traces.model import ProcessTrace, SpanRecord
from traces.run import RunTrace

GOLDEN = Path(__file__).parent.parent / "golden" / "traces"
Event = dict[str, Any]

INTEGER = {"type": "integer"}
TIME = {"type": "number"}
DURATION = {"type": "number", "minimum": 0}
NAME = {"type": "string", "minLength": 1}
ARGS = {"type": "object"}
PLACE = {"pid": INTEGER, "tid": INTEGER, "ts": TIME}


def event_of(phase: str, required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "properties": {"ph": {"const": phase}, "name": NAME, "cat": NAME, **properties},
        "required": ["ph", "name", "pid", *required],
        "additionalProperties": False,
    }


def metadata_of(name: str, argument: str, kind: str) -> dict[str, Any]:
    args = {"properties": {argument: {"type": kind}}, "required": [argument], "additionalProperties": False}
    return event_of("M", ["args", "tid"], {"name": {"const": name}, "pid": INTEGER, "tid": INTEGER, "args": args})


# "Trace Event Format" (Google, 2016): complete, flow, counter, instant and metadata events of the JSON object form.
TRACE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "oneOf": [
                    event_of("X", ["tid", "ts", "dur", "cat"], {**PLACE, "dur": DURATION, "args": ARGS}),
                    event_of("s", ["tid", "ts", "id", "cat"], {**PLACE, "id": INTEGER}),
                    event_of("t", ["tid", "ts", "id", "cat"], {**PLACE, "id": INTEGER}),
                    event_of("f", ["tid", "ts", "id", "cat", "bp"], {**PLACE, "id": INTEGER, "bp": {"const": "e"}}),
                    event_of(
                        "C",
                        ["ts", "args"],
                        {
                            "pid": INTEGER,
                            "ts": TIME,
                            "args": {"type": "object", "additionalProperties": {"type": "number"}},
                        },
                    ),
                    event_of("i", ["tid", "ts", "s"], {**PLACE, "s": {"enum": ["t", "p", "g"]}, "args": ARGS}),
                    metadata_of("process_name", "name", "string"),
                    metadata_of("process_labels", "labels", "string"),
                    metadata_of("process_sort_index", "sort_index", "integer"),
                    metadata_of("thread_name", "name", "string"),
                    metadata_of("thread_sort_index", "sort_index", "integer"),
                ],
            },
        },
    },
}


def exported(where: Path, name: str = "trace.json") -> Any:
    with tempfile.TemporaryDirectory() as folder:
        text = export(RunTrace(where), Path(folder) / name).path.read_text()
    return json.loads(text, parse_float=Decimal)


def check(trace: Any) -> list[Event]:
    """Valid against the schema, every track named, spans nested, every arrow inside a slice. Returns the events."""
    jsonschema.validate(json.loads(json.dumps(trace, default=float)), TRACE_SCHEMA)
    events: list[Event] = trace["traceEvents"]
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    tracks = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {event["pid"] for event in events} <= processes
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] not in "MC"} <= tracks
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in slices.values():
        assert_nested(spans)
    for event in events:
        if event["ph"] in "stf":
            assert any(start <= event["ts"] <= end for start, end in slices[event["pid"], event["tid"]])
    return events


def assert_nested(spans: list[tuple[Any, Any]]) -> None:
    """Any two of the (start, end) are apart, or one contains the other."""
    open_ends: list[Any] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], (
            f"({start}, {end}) leaves the span around it, which ends at {open_ends[-1]}"
        )
        open_ends.append(end)


def test_a_small_run_exports_to_the_stored_file(tmp_path: Path) -> None:
    """To accept a change: python -m traces export tests/golden/traces/run --out tests/golden/traces/trace.json

    The run has two requests at once, a clock 50 ms behind, every kind of event, a killed process and a torn line.
    """
    result = export(RunTrace(GOLDEN / "run"), tmp_path / "trace.json")

    assert result.path.read_text() == (GOLDEN / "trace.json").read_text()
    assert (result.num_unfinished, sum(result.bad_lines.values())) == (1, 1)


def test_the_stored_file_is_a_valid_trace() -> None:
    check(json.loads((GOLDEN / "trace.json").read_text(), parse_float=Decimal))


def test_a_compressed_trace_holds_the_same(tmp_path: Path) -> None:
    export(RunTrace(GOLDEN / "run"), tmp_path / "trace.json.gz")

    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == (GOLDEN / "trace.json").read_bytes()


def test_a_failed_export_leaves_neither_file_nor_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace.json").write_text("the old one")

    def fail(self: object) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("traces.flows.Arrows.events", fail)
    with pytest.raises(OSError, match="No space"):
        export(RunTrace(GOLDEN / "run"), tmp_path / "trace.json")

    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert (tmp_path / "trace.json").read_text() == "the old one"


def test_requests_at_once_get_tracks_of_their_own_and_later_ones_use_them_again(tmp_path: Path) -> None:
    async def main(recorder: Recorder) -> None:
        for step in range(3):
            three_began = asyncio.Barrier(3)

            async def request(prompt: int, began: asyncio.Barrier = three_began) -> None:
                with recorder.span("generate", prompt=prompt):
                    await began.wait()

            with recorder.span("collect_batch", step=step):
                await asyncio.gather(*(request(prompt) for prompt in range(3)))

    with Recorder(tmp_path, "controller", 0, 1, "controller") as recorder:
        asyncio.run(main(recorder))

    events = check(exported(tmp_path))
    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 3


def test_attempts_are_told_apart_and_sorted_controller_first(tmp_path: Path) -> None:
    for attempt in (0, 1):
        for role in ("rollout", "trainer", "controller"):
            Recorder(tmp_path / f"attempts/{attempt}/traces", role, 0, 1, role).close()

    names = [event["args"]["name"] for event in exported(tmp_path)["traceEvents"] if event["name"] == "process_name"]

    roles = ["controller", "trainer", "rollout"]
    assert names == [f"attempt {attempt} · {role}" for attempt in (0, 1) for role in roles]


def arrows(trace: Any) -> list[str]:
    """Each arrow as the letters of its events."""
    chains: dict[int, str] = defaultdict(str)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            chains[event["id"]] += event["ph"]
    return list(chains.values())


def test_a_version_that_several_instances_load_has_an_arrow_to_each(tmp_path: Path) -> None:
    with Recorder(tmp_path, "trainer", 0, 1, "trainer") as trainer, trainer.span("publish_weights"):
        trainer.flow_start("version", 1)
    for rank in range(3):
        with Recorder(tmp_path, "rollout", rank, 1, f"rollout_{rank:03d}") as rollout, rollout.span("commit_weights"):
            rollout.flow_step("version", 1)
            rollout.flow_end("version", 1)

    trace = exported(tmp_path)
    check(trace)
    assert arrows(trace) == ["stf"] * 3


def test_a_retry_is_a_second_arrow_and_an_arrival_without_start_none(tmp_path: Path) -> None:
    with Recorder(tmp_path, "controller", 0, 1, "controller") as recorder:
        recorder.flow_end("prompt", "never sent")
        for _ in range(2):
            recorder.flow_start("prompt", 1)
            recorder.flow_end("prompt", 1)

    trace = exported(tmp_path)
    check(trace)
    assert arrows(trace) == ["sf", "sf"]
    assert trace["otherData"]["flows_without_arrow"] == 1


Tree = list["Tree"]
trees: st.SearchStrategy[Any] = st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=4), max_leaves=12)


@settings(max_examples=30, deadline=None)
@given(programs=st.lists(trees, min_size=1, max_size=3), at_once=st.booleans())
def test_whatever_threads_and_tasks_record_nests_or_gets_its_own_track(programs: list[Tree], at_once: bool) -> None:
    async def walk(recorder: Recorder, tree: Tree) -> None:
        with recorder.span("phase", size=len(tree)):
            recorder.flow_start("prompt", 1)
            await asyncio.sleep(0)
            if at_once:
                await asyncio.gather(*(walk(recorder, inner) for inner in tree))
            else:
                for inner in tree:
                    await walk(recorder, inner)
        recorder.flow_end("prompt", 1)
        recorder.instant("done")

    def run_in_thread(recorder: Recorder, tree: Tree) -> None:
        asyncio.run(walk(recorder, tree))

    with tempfile.TemporaryDirectory() as folder:
        with Recorder(Path(folder), "controller", 0, 1, "controller") as recorder:
            threads = [threading.Thread(target=run_in_thread, args=(recorder, tree)) for tree in programs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        events = check(exported(Path(folder)))

    def size(tree: Tree) -> int:
        return 1 + sum(map(size, tree))

    assert sum(event["name"] == "phase" for event in events) == sum(map(size, programs))


@st.composite
def damaged_spans(draw: st.DrawFn) -> list[SpanRecord]:
    """Spans as damaged or foreign files may hold: parents that end early, that are missing, that have no ids at all."""
    spans = []
    for span_id in range(1, draw(st.integers(1, 25)) + 1):
        start_ns = draw(st.integers(0, 20))
        with_id = draw(st.booleans())
        parent_id = draw(st.none() | st.integers(0, 25)) if with_id else None
        thread = draw(st.sampled_from(["MainThread", "reader"]))
        end_ns = start_ns + draw(st.integers(0, 10))
        spans.append(
            SpanRecord("p", start_ns, end_ns, None, None, thread, "s", span_id if with_id else None, parent_id, {})
        )
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


@given(damaged_spans())
def test_spans_of_any_file_nest_on_their_tracks_under_their_true_parents(spans: list[SpanRecord]) -> None:
    layout = Layout(ProcessTrace(Path("x"), 0, spans=spans), first_tid=1)

    by_track: dict[int, list[SpanRecord]] = defaultdict(list)
    for span in layout.spans:
        by_track[layout.tid_of_span(span)].append(span)
    assert set(by_track) <= set(layout.track_names)
    for members in by_track.values():
        assert_nested([(span.start_ns, span.end_ns) for span in members])
        assert len({span.thread for span in members}) == 1
        for outer in members:
            for inner in members:
                if outer.start_ns < inner.start_ns and inner.end_ns < outer.end_ns:
                    assert outer in ancestors(inner, spans) or (outer.span_id is None and inner.span_id is None)


def ancestors(span: SpanRecord, spans: list[SpanRecord]) -> list[SpanRecord]:
    """Parent, parent's parent and so on, as far as they exist."""
    by_id = {other.span_id: other for other in spans if other.span_id is not None}
    found: list[SpanRecord] = []
    while span.parent_id in by_id and by_id[span.parent_id] not in found:
        span = by_id[span.parent_id]
        found.append(span)
    return found
