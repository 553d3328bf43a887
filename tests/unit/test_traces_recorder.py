"""What the recorder writes, from threads, from tasks, to a failing disk, and when it is killed."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from traces import Recorder
from traces.reader import load_file
from traces.run import RunTrace

Record = dict[str, Any]


def records(path: Path, event: str | None = None) -> list[Record]:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [line for line in lines if event in (None, line["event"])]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path, "trainer", 3, 8, "trainer")


def test_a_span_is_one_line_with_the_fields_of_the_reference_system(recorder: Recorder) -> None:
    with recorder.span("grpo_update", step=3, version=2, samples=8) as span:
        span.add(tokens=5)
    recorder.close()

    (line,) = records(recorder.path, "phase_span")
    assert recorder.path.name == "phase_trace_rank0003.trainer.jsonl"
    assert {key: line[key] for key in ("schema", "rank", "world_size", "step", "phase", "details")} == {
        "schema": "libra.phase_trace.v1",
        "rank": 3,
        "world_size": 8,
        "step": 3,
        "phase": "grpo_update",
        "details": {"samples": 8, "tokens": 5},
    }
    assert line["version"] == 2
    assert line["duration_s"] == pytest.approx((line["end_ns"] - line["start_ns"]) / 1e9, abs=1e-9)
    assert span.duration_s == pytest.approx(line["duration_s"], abs=1e-9)


def test_a_nested_span_knows_its_parent_and_inherits_step_and_version(recorder: Recorder) -> None:
    with recorder.span("step", step=4, version=4):
        with recorder.span("weight_sync", version=5):
            recorder.instant("nack", tensor="lm_head")
    recorder.close()

    inner, outer = records(recorder.path, "phase_span")
    (instant,) = records(recorder.path, "instant")
    assert (inner["parent_id"], outer["parent_id"]) == (outer["span_id"], None)
    assert (inner["step"], inner["version"]) == (4, 5)
    assert (instant["step"], instant["version"], instant["span_id"]) == (4, 5, inner["span_id"])


def test_spans_of_the_same_name_in_concurrent_tasks_stay_apart(recorder: Recorder) -> None:
    both_began = asyncio.Barrier(2)

    async def request(prompt: int) -> None:
        with recorder.span("generate", prompt=prompt) as span:
            await both_began.wait()
            span.add(tokens=prompt * 10)

    async def main() -> None:
        with recorder.span("collect_batch", step=1):
            await asyncio.gather(request(1), request(2))

    asyncio.run(main())
    recorder.close()

    *requests, batch = records(recorder.path, "phase_span")
    assert sorted(line["details"]["tokens"] for line in requests) == [10, 20]
    assert {line["parent_id"] for line in requests} == {batch["span_id"]}


def test_threads_write_whole_lines(recorder: Recorder) -> None:
    def work() -> None:
        for index in range(200):
            with recorder.span("reward_compute", step=index, text="x" * index):
                recorder.counter("queue", index)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()

    spans = records(recorder.path, "phase_span")
    assert len(spans) == 800
    assert len({line["span_id"] for line in spans}) == 800
    assert len(records(recorder.path, "counter")) == 800


def test_an_exception_passes_through_and_leaves_its_name(recorder: Recorder) -> None:
    with pytest.raises(TimeoutError), recorder.span("wait_acks"):
        raise TimeoutError
    recorder.close()

    assert records(recorder.path, "phase_span")[0]["details"] == {"error": "TimeoutError"}


def test_values_that_json_lacks_do_not_break_the_file(recorder: Recorder, tmp_path: Path) -> None:
    class Scalar:
        shape = ()

        def item(self) -> float:
            return 0.5

    with recorder.span("grpo_update", loss=math.nan, scalar=Scalar(), path=tmp_path, nested={1: math.inf}, some={"b"}):
        recorder.counter("reward", math.nan)
    recorder.close()

    details = records(recorder.path, "phase_span")[0]["details"]
    assert details == {"loss": "nan", "scalar": 0.5, "path": str(tmp_path), "nested": {"1": "inf"}, "some": ["b"]}
    assert records(recorder.path, "counter")[0]["value"] is None


def test_closing_records_open_spans_as_unfinished_and_says_that_the_end_was_orderly(recorder: Recorder) -> None:
    span = recorder.span("wait_for_batch", step=7)
    span.__enter__()
    recorder.close()
    recorder.close()
    span.__exit__(None, None, None)

    assert [line["phase"] for line in records(recorder.path, "phase_unfinished")] == ["wait_for_batch"]
    assert [line["reason"] for line in records(recorder.path, "anchor")] == ["open", "close"]


def test_anchors_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traces.recorder.ANCHOR_PERIOD_S", 0.0)
    with Recorder(tmp_path, "trainer", 0, 1, "trainer") as recorder:
        recorder.counter("queue", 1)

    events = [line.get("reason", line["event"]) for line in records(recorder.path)]
    assert events == ["open", "counter", "periodic", "close"]


def test_a_disabled_recorder_writes_nothing_but_still_measures(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "traces", "rollout", 0, 1, "rollout_000", enabled=False)
    with recorder.span("start_server") as span:
        recorder.counter("queue", 1)
        recorder.flow_end("version", 1)
    recorder.close()

    assert span.duration_s > 0
    assert not (tmp_path / "traces").exists()


def test_a_full_disk_is_reported_once_and_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "phase_trace_rank0000.trainer.jsonl").symlink_to("/dev/full")
    recorder = Recorder(tmp_path, "trainer", 0, 1, "trainer")
    for _ in range(10):
        with recorder.span("step"):
            pass
    recorder.close()

    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "No space left" in lines[0]
    assert "22 records were lost" in lines[1]  # 10 spans x (start, end), 2 anchors


def test_a_record_cut_short_by_a_full_disk_spoils_only_itself(tmp_path: Path) -> None:
    script = f"""
import resource
from pathlib import Path
from traces import Recorder
recorder = Recorder(Path({str(tmp_path)!r}), "trainer", 0, 1, "trainer")
resource.setrlimit(resource.RLIMIT_FSIZE, (recorder.path.stat().st_size + 100, resource.RLIM_INFINITY))
recorder.counter("lost", 1)
recorder.counter("lost", 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
recorder.counter("kept", 3)
recorder.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

    process = load_file(tmp_path / "phase_trace_rank0000.trainer.jsonl")
    (session,) = process.sessions.values()
    assert [point.name for point in process.points] == ["kept"]
    assert (process.num_bad_lines, session.dropped) == (1, 2)


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(NotADirectoryError):
        Recorder(tmp_path / "file" / "traces", "trainer", 0, 1, "trainer")


@pytest.mark.parametrize(
    ("rank", "world_size", "name"), [(-1, 1, "trainer"), (0, 0, "trainer"), (0, 1, "../x"), (0, 1, "")]
)
def test_a_name_or_rank_that_makes_no_file_name_is_refused(
    tmp_path: Path, rank: int, world_size: int, name: str
) -> None:
    with pytest.raises(ValueError, match=r"trace (rank|name)"):
        Recorder(tmp_path, "trainer", rank, world_size, name)


def test_files_are_private(recorder: Recorder) -> None:
    assert recorder.path.stat().st_mode & 0o777 == 0o600
    recorder.close()


def test_a_killed_process_leaves_a_readable_trace_with_the_phases_that_it_was_in(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from traces import Recorder
recorder = Recorder(Path({str(tmp_path)!r}), "trainer", 0, 1, "trainer")
with recorder.span("step", step=1):
    with recorder.span("collect_batch"):
        pass
    with recorder.span("weight_sync", version=2):
        print("inside", flush=True)
        time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "inside\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)

    (trace,) = RunTrace(tmp_path).processes()
    assert trace.num_bad_lines == 0
    assert [(span.phase, span.step, span.unfinished) for span in trace.spans] == [
        ("step", 1, True),
        ("collect_batch", 1, False),
        ("weight_sync", 1, True),
    ]


def test_a_restarted_process_appends_to_the_file_of_the_killed_one(tmp_path: Path) -> None:
    path = tmp_path / "phase_trace_rank0002.rollout_002.jsonl"
    path.write_text('{"schema":"libra.phase_trace.v1","rank":2,"wor')
    recorder = Recorder(tmp_path, "rollout", 2, 1, "rollout_002")
    with recorder.span("start_server"):
        pass
    recorder.close()

    process = load_file(path)
    assert [span.phase for span in process.spans] == ["start_server"]
    assert process.num_bad_lines == 1
