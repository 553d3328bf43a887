"""The numbers: sets of time, percentiles, the ledger, what steps waited for, the text, the commands, the picture."""

from __future__ import annotations

import builtins
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import Recorder
from traces.__main__ import main
from traces.intervals import Intervals, intersect, subtract, total, union
from traces.ledger import AttemptActivity, SlotHolder
from traces.model import PointRecord, ProcessTrace, Session, SpanRecord
from traces.phases import COUNTERS, FLOWS, PHASES, LedgerClass
from traces.report import render
from traces.run import RunTrace
from traces.summary import percentile, summarise

GOLDEN_RUN = Path(__file__).parent.parent / "golden" / "traces" / "run"
SECOND = 1_000_000_000

moments = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def seconds_in(intervals: Intervals) -> set[int]:
    return {second for start, end in intervals for second in range(start, end)}


@given(moments, moments)
def test_sets_of_time_behave_like_sets(first: Intervals, second: Intervals) -> None:
    a, b = union(first), union(second)

    assert seconds_in(a) == seconds_in(first)
    assert seconds_in(intersect(a, b)) == seconds_in(a) & seconds_in(b)
    assert seconds_in(subtract(a, b)) == seconds_in(a) - seconds_in(b)
    assert total(a) == len(seconds_in(a))
    assert all(end < start for (_, end), (start, _) in pairwise(a))


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_lie_within_and_in_order(values: list[float]) -> None:
    p50, p95 = percentile(values, 0.5), percentile(values, 0.95)

    assert min(values) <= p50 <= p95 <= max(values)


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([7.0], 0.95) == 7.0


class Process:
    """A process of the unit tests: one session of whole seconds, spans placed by hand."""

    def __init__(
        self, role: str, life: tuple[int, int], *, closed: bool = True, num_slots: float = 1, name: str = ""
    ) -> None:
        session = Session("s", num_slots=num_slots, closed=closed, first_ns=life[0] * SECOND, last_ns=life[1] * SECOND)
        self.trace = ProcessTrace(Path("x"), 0, role=role, name=name or f"{role}_000", sessions={"s": session})

    def span(self, phase: str, start: float, end: float, parent: int | None = None, **details: Any) -> int:
        span_id = len(self.trace.spans) + 1
        times = (int(start * SECOND), int(end * SECOND))
        self.trace.spans.append(SpanRecord(phase, *times, None, None, "MainThread", "s", span_id, parent, details))
        return span_id

    def dropped(self, tokens: int) -> None:
        details = {"tokens": tokens}
        self.trace.points.append(PointRecord("instant", "dropped", 0, None, None, "MainThread", "s", None, details))


def ledger(process: Process, *others: Process, end: int = 100) -> dict[str, float]:
    """Seconds by class, without the zeros."""
    activity = AttemptActivity(0, end * SECOND)
    for other in others:
        activity.learn(other.trace)
    holder = SlotHolder(process.trace)
    for other in others:
        if other.trace.holder_key == process.trace.holder_key:
            holder.add_phases(other.trace)
    seconds = holder.seconds(activity)
    assert sum(seconds.values()) == pytest.approx(end * process.trace.num_slots)
    return {ledger_class.value: value for ledger_class, value in seconds.items() if value}


def test_a_trainer_second_belongs_to_its_innermost_known_phase() -> None:
    trainer = Process("trainer", (10, 100))
    step = trainer.span("step", 10, 90)
    trainer.span("wait_for_batch", 10, 30, step)
    update = trainer.span("grpo_update", 30, 70, step)
    trainer.span("my_own_kernel", 40, 50, update)
    sync = trainer.span("weight_sync", 75, 90, step)
    trainer.span("save_checkpoint", 80, 82, sync)

    assert ledger(trainer) == {
        "set-up": 10,
        "waiting for data": 20,
        "useful train": 40,
        "waiting for weights": 13,
        "other": 17,  # 70 to 75 in the step, the checkpoint, 90 to 100
    }


def test_an_instance_decodes_while_a_request_is_in_flight_and_waits_otherwise() -> None:
    rollout = Process("rollout", (0, 100), num_slots=2)
    rollout.span("start_server", 0, 20)
    server = Process("rollout", (20, 100), num_slots=0, name="rollout_000.server")
    server.span("prepare_weights", 50, 55)
    server.span("commit_weights", 55, 60)
    controller = Process("controller", (0, 100))
    controller.span("generate", 20, 40, instance="rollout_000", tokens=10)
    controller.span("generate", 30, 58, instance="rollout_000", tokens=10)
    controller.span("generate", 60, 100, instance="rollout_001", tokens=20)
    controller.span("wait_for_weights", 60, 80)
    controller.span("evaluate", 70, 85)
    controller.dropped(tokens=10)

    assert ledger(rollout, controller, server) == {
        "set-up": 2 * 20,
        "useful decode": 2 * 35 * 0.75,
        "thrown away": 2 * 35 * 0.25,
        "paused": 2 * 5,
        "waiting for weights": 2 * 10,
        "waiting for data": 2 * 15,
        "other": 2 * 15,
    }


def test_the_time_after_a_kill_and_failed_requests_are_lost() -> None:
    rollout = Process("rollout", (0, 60), closed=False)
    controller = Process("controller", (0, 100))
    controller.span("generate", 0, 50, instance="rollout_000")
    controller.span("generate", 40, 60, instance="rollout_000", error="ConnectError")

    assert ledger(rollout, controller) == {"useful decode": 50, "lost to failure": 50}


def test_the_time_between_two_lives_of_a_process_is_lost() -> None:
    trainer = Process("trainer", (0, 40), closed=False)
    trainer.trace.sessions["t"] = Session("t", first_ns=70 * SECOND, last_ns=100 * SECOND, closed=True)
    trainer.span("grpo_update", 0, 70)

    assert ledger(trainer) == {"useful train": 40, "lost to failure": 30, "other": 30}


def test_every_phase_flow_and_counter_is_explained() -> None:
    sentences = [phase.meaning for phase in PHASES.values()] + [*FLOWS.values(), *COUNTERS.values()]

    assert all(sentence.endswith(".") and " " in sentence for sentence in sentences)
    reference = (
        "step collect_batch distribute rollout_rank_wait align advantage recompute_logprobs grpo_update reward_compute"
    )
    assert {*reference.split(), "weight_sync", "resource_planner", "follow_reconfig"} <= set(PHASES)


def test_the_stored_run_adds_up() -> None:
    summary = summarise(RunTrace(GOLDEN_RUN))

    (generate,) = [row for row in summary.phases if row.phase == "generate"]
    assert (generate.role, generate.count) == ("controller", 2)
    assert [generate.total_s, generate.p50_s, generate.max_s] == pytest.approx([0.023, 0.0115, 0.013])
    assert [summary.overlap.training_s, summary.overlap.both_s] == pytest.approx([0.0125, 0])
    (step,) = summary.steps
    assert (step.step, step.dominated_by) == (1, "data")
    assert [step.data_s, step.train_s, step.weights_s] == pytest.approx([0.024, 0.0125, 0.012])
    assert summary.open_processes == ["attempt 0 rollout_000"]
    for classes in summary.ledger.values():
        assert sum(classes.values()) == pytest.approx(summary.duration_s)


def test_generation_during_training_counts_as_overlap(tmp_path: Path) -> None:
    controller = Recorder(tmp_path, "controller", 0, 1, "controller")
    trainer = Recorder(tmp_path, "trainer", 0, 1, "trainer")
    with controller.span("generate", step=2), trainer.span("grpo_update", step=1):
        pass
    controller.close()
    trainer.close()

    overlap = summarise(RunTrace(tmp_path)).overlap

    assert 0 < overlap.both_s == overlap.training_s < overlap.generation_s


def test_the_text_says_what_was_torn_killed_and_shifted() -> None:
    text = render(summarise(RunTrace(GOLDEN_RUN)))

    assert "1 torn or foreign lines skipped" in text
    assert "no orderly end (killed, or still running): attempt 0 rollout_000" in text
    assert "clock shifted by +0.049500 s" in text


def test_export_writes_into_the_run_and_says_how_to_look_at_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Recorder(tmp_path / "attempts/0/traces", "trainer", 0, 1, "trainer").close()

    assert main(["export", str(tmp_path), "--gzip"]) == 0

    said = capsys.readouterr().out
    assert str(tmp_path / "trace.json.gz") in said
    assert "ui.perfetto.dev" in said
    assert (tmp_path / "trace.json.gz").exists()


@pytest.mark.parametrize("command", ["export", "summary", "picture"])
def test_a_folder_without_traces_is_an_error_with_status_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2

    assert f"no traces in {tmp_path}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_summary_is_also_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(GOLDEN_RUN), "--json"]) == 0

    summary = json.loads(capsys.readouterr().out)
    assert set(summary["ledger"]["trainer"]) == {ledger_class.value for ledger_class in LedgerClass}
    assert summary["steps"][0]["dominated_by"] == "data"


@pytest.mark.parametrize(("name", "magic"), [("trace.png", b"\x89PNG"), ("trace.svg", b"<?xml")])
def test_the_picture_is_drawn(name: str, magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    assert main(["picture", str(GOLDEN_RUN), "--out", str(tmp_path / name)]) == 0

    assert (tmp_path / name).read_bytes().startswith(magic)


def test_a_step_that_the_run_does_not_have_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")

    assert main(["picture", str(GOLDEN_RUN), "--first-step", "9", "--out", str(tmp_path / "x.png")]) == 2

    assert "no step 9 or later in this run: it has steps 1 to 1" in capsys.readouterr().err


def test_a_missing_matplotlib_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_import = builtins.__import__

    def without_matplotlib(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)

    assert main(["picture", str(GOLDEN_RUN), "--out", str(tmp_path / "trace.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
