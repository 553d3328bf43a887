"""The trainer goes on while a version is written and loaded, as far as max_head_offpolicyness lets it, and meets what comes of it.

Ranks are real processes; the instance and the controller are played by the test.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages.files import list_names, wait_for
from stages.rundir import RunDir
from stages.weights import apply, reader
from stages.weights.records import Nack
from tests.checkpoint_kit import INSTANCE, MODEL, TOTAL_STEPS, Case, make_model, make_run
from tests.resume_kit import WAIT_S, Attempt, Ranks, answering, trained_steps
from tests.weights_kit import as_writer

CASE = Case(1, 2, "float32")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    make_model(folder / MODEL)
    return folder


def is_served(run: RunDir, version: int) -> bool:
    return run.refreshed_json(version).name in list_names(run.refreshed)


def spans(run: RunDir, rank: int, phase: str) -> list[dict[str, Any]]:
    name = f"phase_trace_rank{rank:04d}.trainer.jsonl"
    text = (run.traces / name).read_text() if name in list_names(run.traces) else ""
    records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in records if (record["event"], record["phase"]) == ("phase_span", phase)]


def wait_updated(run: RunDir, step: int) -> None:
    """Until rank 0 has taken the optimizer step; its receipt comes when all that the step waits for is there."""

    def look() -> bool | None:
        return any(span["step"] == step for span in spans(run, 0, "grpo_update")) or None

    wait_for(look, deadline_s=WAIT_S, awaited=f"update {step}", from_whom="the trainer")


@dataclass
class Ahead:
    """All batches were there from the start; the instance loads version 1 only when step 1 was trained."""

    attempt: Attempt
    results: list[Any]
    served_when_updated: dict[int, bool]


@pytest.fixture(scope="module")
def ahead(root: Path, ranks: Ranks) -> Ahead:
    attempt = Attempt(make_run(root, CASE, "ahead", max_head_offpolicyness=1), deaf_to=1)
    attempt.write_batches(range(TOTAL_STEPS))
    seen = {}
    with answering(attempt):
        ranks.start(attempt.run, CASE.ranks)
        for step in (0, 1):
            wait_updated(attempt.run, step)
            seen[step] = is_served(attempt.run, 1)
        attempt.deaf_to = -1
        results = ranks.results()
    return Ahead(attempt, results, seen)


def test_a_step_is_done_before_a_slow_instance_serves_the_version_before(ahead: Ahead) -> None:
    assert ahead.results == [{"steps": TOTAL_STEPS}] * CASE.ranks, ahead.attempt.log
    assert ahead.served_when_updated == {0: False, 1: False}


def test_every_version_is_still_served_one_after_the_other(ahead: Ahead) -> None:
    assert ahead.attempt.served == list(range(TOTAL_STEPS + 1))


def test_training_ahead_gives_the_weights_of_training_in_turn_bit_for_bit(
    ahead: Ahead, root: Path, ranks: Ranks
) -> None:
    in_turn = Attempt(make_run(root, CASE, "in_turn", max_head_offpolicyness=0))
    in_turn.write_batches(range(TOTAL_STEPS))
    with answering(in_turn):
        ranks.start(in_turn.run, CASE.ranks)
        ranks.results()

    versions = (TOTAL_STEPS - 1, TOTAL_STEPS)
    assert [ahead.attempt.digest(version) for version in versions] == [in_turn.digest(version) for version in versions]


def test_receipts_tell_what_the_trainer_itself_waited_for(ahead: Ahead) -> None:
    run = ahead.attempt.run
    waits = [run.read(run.batch(step) / "trained.json")["seconds"]["wait_acks"] for step in range(2)]  # type: ignore[index]
    loading = next(span for span in spans(run, 0, "serve_version") if span["version"] == 1)

    assert waits[0] == 0.0
    assert waits[1] > 0.0 or loading["duration_s"] > 0.0
    assert waits[1] < loading["duration_s"]


def test_what_goes_on_beside_the_training_has_its_own_track(ahead: Ahead) -> None:
    for rank in range(CASE.ranks):
        for phase in ("write_version", "serve_version"):
            found = spans(ahead.attempt.run, rank, phase)
            assert {span["thread"] for span in found} == {"refresh"}
            assert [span["version"] for span in found] == list(range(TOTAL_STEPS + 1))
        (update,) = (span for span in spans(ahead.attempt.run, rank, "grpo_update") if span["step"] == 1)
        (load,) = (span for span in spans(ahead.attempt.run, rank, "serve_version") if span["version"] == 1)
        assert update["thread"] == "MainThread"
        assert load["end_ns"] > update["end_ns"]


def test_between_two_syncs_the_trainer_goes_on_while_the_instance_loads(root: Path, ranks: Ranks) -> None:
    options = {"sync_interval": 2, "max_head_offpolicyness": 2}
    attempt = Attempt(make_run(root, CASE, "syncs", **options), deaf_to=2)
    attempt.write_batches(range(TOTAL_STEPS))
    with answering(attempt):
        ranks.start(attempt.run, CASE.ranks)
        wait_updated(attempt.run, 2)
        served_early = is_served(attempt.run, 2)
        attempt.deaf_to = -1
        results = ranks.results()

    assert not served_early
    assert results == [{"steps": TOTAL_STEPS}] * CASE.ranks, attempt.log
    assert attempt.served == [0, 2, 4]


def test_a_stop_request_ahead_of_a_slow_instance_keeps_every_step(root: Path, ranks: Ranks) -> None:
    attempt = Attempt(make_run(root, CASE, "stopped", max_head_offpolicyness=1), deaf_to=1)
    attempt.write_batches(range(TOTAL_STEPS))
    with answering(attempt):
        ranks.start(attempt.run, CASE.ranks)
        attempt.wait_trained(0)
        attempt.ask_to_stop()
        results = ranks.results()

    steps = len(trained_steps(attempt.run))
    assert steps in (1, 2)
    assert results == [{"stopped_at": steps, "checkpoint": steps}] * CASE.ranks, attempt.log
    assert not is_served(attempt.run, 1)


@pytest.mark.parametrize("num_batches", [1, 2], ids=["waiting for a batch", "waiting for the instance"])
def test_an_instance_that_refuses_beside_the_training_ends_all_ranks_with_that_error(
    root: Path, ranks: Ranks, num_batches: int
) -> None:
    run = make_run(root, CASE, f"refused_{num_batches}", max_head_offpolicyness=1)
    attempt = Attempt(run, deaf_to=1)
    attempt.write_batches(range(num_batches))
    with answering(attempt):
        ranks.start(run, CASE.ranks)
        wait_updated(run, num_batches - 1)
        attempt.wait_requested(1)
        digest = reader.load_manifest(run, 1).digest
        apply.write_nack(as_writer(run, INSTANCE), Nack(INSTANCE, 1, digest, "commit", "worn out", -1))
        errors = [result["error"] for result in ranks.results()]

    assert len(set(errors)) == 1
    assert errors[0].startswith("WeightRefreshError: weight refresh to version 1 failed on rollout_000: refused")
    assert trained_steps(run) == [0]


def test_ranks_that_wait_for_the_first_to_hear_from_the_instances_end_when_it_is_killed(
    root: Path, ranks: Ranks
) -> None:
    attempt = Attempt(make_run(root, CASE, "killed", max_head_offpolicyness=1), deaf_to=1)
    attempt.write_batches(range(1))
    with answering(attempt):
        ranks.start(attempt.run, CASE.ranks)
        attempt.wait_requested(1)
        pid = ranks.process.pid
        first, _second = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(first), signal.SIGKILL)
        results = ranks.results()

    assert results[0] == {"error": "it died without a word"}
    assert "Connection closed by peer" in results[1]["error"]
