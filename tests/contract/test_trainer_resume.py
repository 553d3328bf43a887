"""The trainer stage over several attempts: stopped with a checkpoint, resumed among leftovers, and with nothing left to do.

Ranks are real processes; the instance and the controller are played by the test.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.checkpoint import newest
from stages.rundir import RunDir
from stages.weights.instances import read_status
from tests.checkpoint_kit import MODEL, TOTAL_STEPS, Case, make_model, make_run
from tests.resume_kit import Attempt, Ranks, answering, next_attempt, trained_steps
from tests.weights_kit import as_writer, publish_full, register

CASE = Case(1, 2, "float32")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    make_model(folder / MODEL)
    return folder


@pytest.fixture(scope="module")
def straight(root: Path, ranks: Ranks) -> Attempt:
    """Four steps at once."""
    attempt = Attempt(make_run(root, CASE, "straight"))
    attempt.write_batches(range(TOTAL_STEPS))
    with answering(attempt):
        ranks.start(attempt.run, CASE.ranks)
        results = ranks.results()
    assert results == [{"steps": TOTAL_STEPS}] * CASE.ranks, attempt.log
    return attempt


@pytest.fixture(scope="module")
def stopped(root: Path, ranks: Ranks) -> tuple[Attempt, list[Any]]:
    """Asked to stop while it waits for batch 3; its last periodic checkpoint is of step 2."""
    attempt = Attempt(make_run(root, CASE, "resumed"))
    attempt.write_batches(range(3))
    with answering(attempt):
        ranks.start(attempt.run, CASE.ranks)
        attempt.wait_trained(2)
        attempt.ask_to_stop()
        results = ranks.results()
    return attempt, results


@pytest.fixture(scope="module")
def resumed(stopped: tuple[Attempt, list[Any]], ranks: Ranks) -> tuple[Attempt, list[Any]]:
    """A second attempt that has to go on from step 2, because the checkpoint of step 3 is damaged; leftovers of every kind."""
    first = stopped[0].run
    plant_leftovers(first)
    damage(first, 3)
    attempt = Attempt(next_attempt(first))
    attempt.write_batches(range(2, TOTAL_STEPS))
    with answering(attempt):
        ranks.start(attempt.run, CASE.ranks)
        results = ranks.results()
    return attempt, results


def plant_leftovers(run: RunDir) -> None:
    """Versions beyond the checkpoint, requests and ACKs for them, the registration of a server that is gone."""
    trainer, agent = as_writer(run, "trainer"), as_writer(run, "rollout_000")
    for version in (4, 7):
        publish_full(trainer, version)
        trainer.write(run.request_json(version), {"version": version})
        trainer.write(run.refreshed_json(version), {"version": version})
        run.acks(version).mkdir(parents=True, exist_ok=True)
        for phase in ("prepared", "loaded", "nack"):
            agent.write(run.ack_json(version, "rollout_000", phase), {"version": version})
    for phase in ("prepared", "loaded", "nack"):
        agent.write(run.ack_json(2, "rollout_000", phase), {"version": 2, "digest": "of the first attempt"})
    register(run, "rollout_000", version=7, leases=(7,))


def damage(run: RunDir, step: int) -> None:
    path = run.checkpoint(step) / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_stop_request_ends_all_ranks_with_a_checkpoint_of_what_was_trained(
    stopped: tuple[Attempt, list[Any]],
) -> None:
    attempt, results = stopped

    assert results == [{"stopped_at": 3, "checkpoint": 3}] * CASE.ranks, attempt.log
    assert "asked to stop (time limit) at step 3" in attempt.log


def test_two_steps_and_two_after_a_resume_are_four_steps_bit_for_bit(
    straight: Attempt, resumed: tuple[Attempt, list[Any]]
) -> None:
    attempt, results = resumed

    assert results == [{"steps": TOTAL_STEPS}] * CASE.ranks, attempt.log
    assert attempt.digest(TOTAL_STEPS) == straight.digest(TOTAL_STEPS)
    assert attempt.digest(3) == straight.digest(3)
    for step in (2, 3):
        before, after = (run.read(run.batch(step) / "trained.json") for run in (straight.run, attempt.run))
        assert before is not None
        assert after is not None
        for name in ("loss", "grad_norm", "learning_rate", "clip_fraction", "logprob_difference_max"):
            assert after[name] == before[name]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(resumed: tuple[Attempt, list[Any]]) -> None:
    log = resumed[0].log

    assert "warning: checkpoint step_000003 is damaged: xxh3-128 of rank_00001.safetensors is" in log
    assert "going on from step_000002" in log
    assert resumed[0].run.read(resumed[0].run.start_json)["step"] == 2  # type: ignore[index]


def test_the_first_version_of_the_new_attempt_is_that_of_the_checkpoint(resumed: tuple[Attempt, list[Any]]) -> None:
    assert resumed[0].served == [2, 3, 4]
    assert trained_steps(resumed[0].run) == [2, 3]


def test_what_the_lost_line_left_behind_is_gone(resumed: tuple[Attempt, list[Any]]) -> None:
    run = resumed[0].run

    assert 7 not in run.published_versions()
    assert "removed weight versions [3, 4, 7], set checkpoints [3] aside" in resumed[0].log
    assert run.read(run.latest_json)["version"] == TOTAL_STEPS  # type: ignore[index]
    assert read_status(run, "rollout_000") is None


def test_the_newest_two_checkpoints_are_kept(resumed: tuple[Attempt, list[Any]]) -> None:
    run = resumed[0].run

    assert sorted(run.published_checkpoints()) == [2, TOTAL_STEPS]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000002", "step_000004"]
    saved = newest(run)
    assert saved is not None
    assert (saved.step, saved.attempt) == (TOTAL_STEPS, 1)
    assert 0 < saved.manifest.save_s < 60
    assert 0 < saved.manifest.step_s < 60


def test_with_nothing_left_to_train_it_says_so_and_publishes_nothing(
    resumed: tuple[Attempt, list[Any]], ranks: Ranks
) -> None:
    first = resumed[0].run
    as_writer(first, "controller").write(first.summary_json, {"steps": TOTAL_STEPS})
    attempt = Attempt(next_attempt(first))

    ranks.start(attempt.run, CASE.ranks)

    message = "nothing left to train: checkpoint is at step 4 of 4"
    assert ranks.results() == [{"steps": TOTAL_STEPS, "message": message}] * CASE.ranks
    assert message in attempt.log
    assert attempt.run.read(attempt.run.latest_json) is None


def test_a_stop_request_while_a_version_waits_for_its_acks_keeps_the_step(root: Path, ranks: Ranks) -> None:
    attempt = Attempt(make_run(root, CASE, "deaf"), deaf_to=1)
    attempt.write_batches(range(1))
    with answering(attempt):
        ranks.start(attempt.run, CASE.ranks)
        attempt.wait_requested(1)
        attempt.ask_to_stop()
        results = ranks.results()

    assert results == [{"stopped_at": 1, "checkpoint": 1}] * CASE.ranks, attempt.log
    assert trained_steps(attempt.run) == [0]


def test_a_stop_request_before_the_first_step_leaves_no_checkpoint(root: Path, ranks: Ranks) -> None:
    attempt = Attempt(make_run(root, CASE, "early"), deaf_to=0)
    with answering(attempt):
        ranks.start(attempt.run, CASE.ranks)
        attempt.wait_requested(0)
        attempt.ask_to_stop()
        results = ranks.results()

    assert results == [{"stopped_at": 0, "checkpoint": 0}] * CASE.ranks, attempt.log
    assert newest(attempt.run) is None


def test_when_all_checkpoints_are_damaged_the_run_is_not_started_over(
    stopped: tuple[Attempt, list[Any]], resumed: tuple[Attempt, list[Any]], ranks: Ranks
) -> None:
    run = next_attempt(resumed[0].run)
    for step in run.published_checkpoints():
        damage(run, step)
    ranks.start(run, CASE.ranks)

    errors = [result["error"] for result in ranks.results()]

    assert all("NoSoundCheckpointError: none of the checkpoints" in error for error in errors), errors
    assert "move" in errors[0]
    assert sorted(run.published_checkpoints()) == [2, 4]
    assert json.loads((run.checkpoint(4) / "manifest.json").read_text())["step"] == 4
