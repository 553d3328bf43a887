"""Whole runs of the controller stage against a scripted server over HTTP and a trainer that only signs."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.controller import alone, stage
from stages.controller.ledger import read_ledger
from stages.desired import read_desired
from tests.controller_kit import (
    Reply,
    Request,
    serving,
    until,
)
from tests.controller_scene import Scene, scene, staleness_of


def test_a_run_trains_every_step_and_leaves_summary_metrics_and_a_stopped_desired_state(tmp_path: Path) -> None:
    played = scene(tmp_path)

    summary = played.play()

    assert played.run.read(played.run.summary_json) is not None
    assert summary["steps"] == 3
    assert (summary["reward_before"], summary["reward_after"]) == (1.0, 1.0)
    assert (summary["sampled_before"], summary["sampled_after"]) == (0.5, 0.5)
    assert summary["weight_refresh_s"] == [0.05] * 4
    assert summary["checkpoint"] == str(played.run.weights_version(3))
    assert summary["phase_s"]["grpo_update"] == pytest.approx(0.6)
    assert summary["attempts"] == 1
    assert [line.get("event", line.get("step")) for line in played.lines()] == ["evaluation", 0, 1, 2, "evaluation"]
    desired = read_desired(played.run)
    assert desired is not None
    assert (desired.phase, desired.outcome) == ("stop", "success")


def test_phases_that_follow_each_other_add_up_to_the_wall_time(tmp_path: Path) -> None:
    summary = scene(tmp_path).play()

    phases = [summary["phase_s"][name] for name in ("start_up", "evaluate_before", "steps", "evaluate_after")]
    assert sum(phases) == pytest.approx(summary["wall_s"], abs=0.01)


@pytest.mark.exercises("batch_size", "n_samples")
def test_batches_carry_prompts_answers_rewards_and_advantages_of_whole_groups(tmp_path: Path) -> None:
    played = scene(tmp_path)

    played.play()

    batch, manifest = played.trainer.batches[0]
    assert batch.num_sequences == 8
    assert sorted(np.unique(batch.group_ids).tolist()) == [0, 1, 2, 3]
    assert batch.rewards.tolist() == [1.0, 0.0] * 4
    assert batch.advantages.tolist() == [0.5, -0.5] * 4
    assert set(batch.behaviour_logprobs[batch.loss_mask == 1].tolist()) == {-0.25}
    assert manifest.extra["staleness_max"] == 0


def test_on_policy_batches_come_from_the_very_version_they_train(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=4, max_head_offpolicyness=0)

    played.play()

    assert staleness_of(played) == [0, 0, 0, 0]
    assert set(played.trainer.on_disk) == {1}


@pytest.mark.exercises("max_head_offpolicyness")
@pytest.mark.parametrize("offpolicyness", [1, 2])
def test_generation_runs_ahead_as_far_as_staleness_allows_and_no_further(tmp_path: Path, offpolicyness: int) -> None:
    played = scene(tmp_path, total_steps=5, max_head_offpolicyness=offpolicyness)
    ahead = threading.Event()

    def wait_until_ahead(step: int) -> None:
        if step == 0:
            until(lambda: len(played.run.published_batches()) == offpolicyness + 1)
            ahead.set()

    played.trainer.before_step = wait_until_ahead
    played.play()

    assert ahead.is_set()
    assert max(staleness_of(played)) == offpolicyness
    assert max(played.trainer.on_disk) <= offpolicyness + 1


@pytest.mark.exercises("sync_interval")
def test_weights_synced_every_second_step_do_not_stop_the_run(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=5, sync_interval=2, max_head_offpolicyness=1)

    played.play()

    assert [line["version"] for line in played.steps()] == [0, 2, 2, 4, 5]
    assert max(staleness_of(played)) <= 1


def test_groups_are_spread_over_the_instances(tmp_path: Path) -> None:
    played = scene(tmp_path, instances=2, launch={"evaluate": False})
    for server in played.servers:  # so that a step's requests are under way together
        server.script = lambda request: Reply(delay_s=0.3)

    played.play()

    sizes = [sum(len(request.prompts) for request in server.requests) for server in played.servers]
    assert sizes == [6, 6]


def test_a_slow_straggler_does_not_hold_up_the_batches_that_need_not_have_it(tmp_path: Path) -> None:
    played = scene(
        tmp_path, total_steps=4, max_head_offpolicyness=2, rollout={"request_tokens": 1}, launch={"evaluate": False}
    )
    played.servers[0].script = lambda request: Reply(delay_s=0.5 if request.prompts == ["10"] else 0.0)

    played.play()

    first_batches = np.concatenate([batch.group_ids for batch, _ in played.trainer.batches[:2]])
    assert 0 not in first_batches
    assert max(staleness_of(played)) <= 2


def test_a_group_that_became_too_stale_is_dropped_and_its_prompt_asked_again(tmp_path: Path) -> None:
    played = scene(
        tmp_path, total_steps=4, max_head_offpolicyness=1, rollout={"request_tokens": 1}, launch={"evaluate": False}
    )
    ledger_path = played.run.ledger / "attempt_000.jsonl"

    def keep_old_version(answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            choice["version_segments"] = [[0, len(choice["token_ids"])]]

    def script(request: Request) -> Reply:
        """Only the first answer to the first prompt is late: batch 1 is filled without it."""
        asked_before = [earlier.prompts for earlier in played.training_requests()].count(["10"])
        return Reply(0.6, change=keep_old_version) if request.prompts == ["10"] and asked_before == 1 else Reply()

    def hold_step_2_until_the_drop(step: int) -> None:
        if step == 2:
            until(lambda: read_ledger(ledger_path).dropped == 1)

    played.servers[0].script = script
    played.trainer.before_step = hold_step_2_until_the_drop
    summary = played.play()

    assert summary["groups"]["dropped"] == {"stale": 1}
    assert [request.prompts for request in played.training_requests()].count(["10"]) == 2
    assert max(staleness_of(played)) <= 1


def test_tokens_made_across_a_weight_change_keep_the_version_that_made_each(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=3, max_head_offpolicyness=2, launch={"evaluate": False})
    changed = threading.Event()

    def script(request: Request) -> Reply:
        changed.set()
        return Reply(delay_s=0.5 if request.number == 0 else 0.0)

    played.servers[0].script = script
    with serving(played.servers), played.context() as context:
        thread = threading.Thread(target=_change_version_in_flight, args=(played, changed), daemon=True)
        thread.start()
        stage.run(context)
        thread.join()

    batch, _ = played.trainer.batches[0]
    assert set(batch.versions[batch.loss_mask == 1].tolist()) == {0, 1}
    assert played.steps()[0]["staleness_max"] == 0


def _change_version_in_flight(played: Scene, changed: threading.Event) -> None:
    """Version 1 appears on the server while the first request is in flight; the records follow as usual."""
    played.trainer.begin()
    assert changed.wait(10)
    for server in played.servers:
        server.version = 1
    for step in range(3):
        played.trainer._step(step)


def test_uniform_groups_are_replaced_when_asked_for(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=1, algorithm={"drop_uniform_groups": True}, launch={"evaluate": False})
    played.servers[0].policy = lambda prompt, sample: str(int(prompt) + 1) if sample == 0 or int(prompt) < 12 else "0"

    summary = played.play()

    assert summary["groups"]["dropped"] == {"uniform": 2}
    assert played.trainer.batches[0][1].extra["uniform_groups"] == 0


def test_a_policy_that_is_always_right_still_gets_its_batches(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=2, algorithm={"drop_uniform_groups": True}, launch={"evaluate": False})
    played.servers[0].policy = lambda prompt, sample: str(int(prompt) + 1)

    summary = played.play()

    assert summary["steps"] == 2
    assert summary["groups"]["dropped"] == {"uniform": 24}


def test_the_ledger_of_a_run_adds_up(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=3, max_head_offpolicyness=1)

    played.play()

    state = read_ledger(played.run.ledger / "attempt_000.jsonl")
    assert (state.issued, state.dropped, state.trained_steps) == (12, 0, 3)
    assert sorted(group for groups in state.batches.values() for group in groups) == list(range(12))
    assert not state.in_flight


def test_the_controller_alone_generates_and_scores_without_writing(tmp_path: Path) -> None:
    played = scene(tmp_path)
    played.servers[0].version = 4

    with serving(played.servers), played.context() as context:
        lines = alone.generate_only(context, steps=2)
        evaluation = alone.evaluate_only(context)

    assert [line["reward"] for line in lines] == [0.5, 0.5]
    assert lines[0]["oldest_version"] == 4
    assert (evaluation["version"], evaluation["greedy_reward"]) == (4, 1.0)
    assert played.run.published_batches() == []
    assert not list(played.run.ledger.iterdir())


@pytest.mark.parametrize("option, printed", [("--no-train", '"reward": 0.5'), ("--evaluate", '"greedy_reward": 1.0')])
def test_the_command_works_alone_on_a_run_directory(tmp_path: Path, option: str, printed: str) -> None:
    played = scene(tmp_path)
    played.servers[0].version = 0

    with serving(played.servers):
        command = [sys.executable, "-m", "stages.controller", str(played.run.root), option]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_the_command_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stages.controller", str(tmp_path), "--no-train"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert "holds no run" in done.stderr
    assert "Traceback" not in done.stderr
