"""Options of a run as its servers and its trainer see them: the controller stage against scripted ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launch.unread import might_read
from stages.controller.ledger import read_ledger
from stages.warmup.vocabulary import save_tokenizer
from tests.controller_kit import TOKENIZER, Reply, Request
from tests.controller_scene import scene


@pytest.mark.exercises("n_samples", "max_new_tokens")
def test_every_request_asks_for_the_group_and_the_length_that_the_run_wants(tmp_path: Path) -> None:
    played = scene(tmp_path, batch_size=6, n_samples=3, max_new_tokens=5, temperature=0.5, total_steps=2)

    played.play()

    asked = {(request.n, request.max_tokens, request.temperature) for request in played.training_requests()}
    assert asked == {(3, 5, 0.5)}


@pytest.mark.exercises("batch_size", "n_samples")
@pytest.mark.parametrize(("batch_size", "n_samples"), [(4, 2), (12, 2), (12, 4)])
def test_a_step_trains_batch_size_trajectories_in_groups_of_n_samples(
    tmp_path: Path, batch_size: int, n_samples: int
) -> None:
    played = scene(tmp_path, batch_size=batch_size, n_samples=n_samples, total_steps=2, launch={"evaluate": False})

    played.play()

    for batch, _ in played.trainer.batches:
        assert batch.num_sequences == batch_size
        assert set(np.unique(batch.group_ids, return_counts=True)[1].tolist()) == {n_samples}


@pytest.mark.exercises("max_concurrent_rollouts")
@pytest.mark.parametrize(("most", "groups"), [(2, 1), (5, 2), (8, 4)])
def test_no_more_trajectories_are_in_flight_than_allowed(tmp_path: Path, most: int, groups: int) -> None:
    played = scene(
        tmp_path,
        max_concurrent_rollouts=most,
        max_head_offpolicyness=2,
        rollout={"request_tokens": 1},
        launch={"evaluate": False},
    )
    in_flight: list[int] = []

    def look(request: Request) -> Reply:
        in_flight.append(len(read_ledger(played.run.ledger / "attempt_000.jsonl").in_flight))
        return Reply(delay_s=0.02)

    played.servers[0].script = look
    played.play()

    assert max(in_flight) == groups


@pytest.mark.exercises("tokenizer_path")
def test_prompts_are_encoded_by_the_tokenizer_that_the_run_names(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    save_tokenizer(TOKENIZER, tokenizer, max_length=32)
    played = scene(tmp_path, tokenizer_path=str(tokenizer), launch={"evaluate": False})
    (tmp_path / "model" / "tokenizer.json").unlink()

    assert played.play()["steps"] == 3


def test_what_the_controller_reads_is_recorded_and_known_from_its_code(tmp_path: Path) -> None:
    played = scene(tmp_path)

    played.play()

    record = played.run.read(played.run.reads_json("controller", 0))
    assert record is not None
    assert {"n_samples", "total_steps", "task.params", "rollout.request_timeout_s"} <= set(record["options"])
    assert set(record["options"]) <= might_read("controller")
