"""Whole runs of the controller stage against a scripted server over HTTP and a trainer that only signs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.context import StageContext, StoppedError, open_context
from stages.controller import alone, stage
from stages.controller.client import RequestRefusedError
from stages.controller.dispatcher import PromptFailedError
from stages.controller.evaluation import EvaluationError
from stages.controller.ledger import read_ledger
from stages.controller.loop import BatchCollectionTimeoutError
from stages.controller.progress import TrainerSilentError
from stages.desired import read_desired
from stages.files import WaitTimeoutError
from stages.rundir import RunDir
from tests.controller_kit import (
    Reply,
    Request,
    ScriptedServer,
    SigningTrainer,
    make_run,
    serving,
    training,
    until,
)


@dataclass
class Scene:
    """One run with everything around the controller."""

    run: RunDir
    servers: list[ScriptedServer]
    trainer: SigningTrainer
    stopped_s: float = 0.0

    def play(self) -> dict[str, Any]:
        with serving(self.servers), training(self.trainer), self.context() as context:
            result = stage.run(context)
        assert self.trainer.error is None
        return result

    def context(self) -> Any:
        return open_context("controller", self.run.root, name="controller")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.metrics_jsonl.read_text().splitlines()]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "step" in line]

    def training_requests(self) -> list[Request]:
        """Without those of the evaluation, whose prompts start with 00."""
        requests = [request for server in self.servers for request in server.requests]
        return [request for request in requests if not request.prompts[0].startswith("00")]


def scene(tmp_path: Path, instances: int = 1, **options: Any) -> Scene:
    run = make_run(tmp_path, instances, **options)
    with open_context("controller", run.root, name="controller") as context:
        config = context.config
    servers = [ScriptedServer(f"rollout_{i:03d}", run) for i in range(instances)]
    writer = RunDir(run.root, run.run_id, run.attempt, "trainer")
    return Scene(run, servers, SigningTrainer(writer, config.total_steps, config.sync_interval, servers))


def staleness_of(scene: Scene) -> list[int]:
    """Of the oldest token of every batch, counted from the batch files."""
    return [step - batch.oldest_version for step, (batch, _) in enumerate(scene.trainer.batches)]


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


def test_weights_synced_every_second_step_do_not_stop_the_run(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=5, sync_interval=2, max_head_offpolicyness=1)

    played.play()

    assert [line["version"] for line in played.steps()] == [0, 2, 2, 4, 5]
    assert max(staleness_of(played)) <= 1


def test_a_request_that_fails_is_asked_again_and_nothing_is_lost(tmp_path: Path) -> None:
    played = scene(tmp_path)
    played.servers[0].script = lambda request: Reply(status=503 if request.number == 2 else 200)

    summary = played.play()

    assert summary["groups"]["dropped"] == {"failed": 4}
    prompts = [int(prompt) for request in played.training_requests() for prompt in request.prompts]
    assert set(prompts) == set(range(10, 22))  # no prompt skipped, none new


def test_prompts_of_a_failed_request_travel_alone_afterwards(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=1)
    played.servers[0].script = lambda request: Reply(status=500 if request.number == 2 else 200)

    played.play()

    assert [len(request.prompts) for request in played.training_requests()] == [4, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "break_answer",
    [
        lambda answer: answer["choices"].pop(),
        lambda answer: answer["choices"][0]["logprobs"]["token_logprobs"].pop(),
        lambda answer: answer["choices"][0].update(version_segments=[[0, 1]]),
        lambda answer: answer["choices"][0].update(finish_reason="abort"),
    ],
    ids=["a choice is missing", "a log-prob is missing", "a version is missing", "aborted"],
)
def test_an_answer_that_breaks_the_contract_is_asked_again(tmp_path: Path, break_answer: Any) -> None:
    played = scene(tmp_path, total_steps=1)
    played.servers[0].script = lambda request: Reply(change=break_answer if request.number == 2 else None)

    assert played.play()["groups"]["dropped"] == {"failed": 4}


def test_a_broken_connection_is_survived_by_the_other_instance(tmp_path: Path) -> None:
    played = scene(tmp_path, instances=2, total_steps=2, launch={"evaluate": False})
    played.servers[0].script = lambda request: Reply(status=0)

    summary = played.play()

    assert summary["steps"] == 2
    assert played.servers[1].requests


def test_groups_are_spread_over_the_instances(tmp_path: Path) -> None:
    played = scene(tmp_path, instances=2, launch={"evaluate": False})

    played.play()

    sizes = [sum(len(request.prompts) for request in server.requests) for server in played.servers]
    assert sizes == [6, 6]


def test_a_prompt_that_fails_for_ever_ends_the_run_and_is_named(tmp_path: Path) -> None:
    played = scene(tmp_path, launch={"evaluate": False}, rollout={"max_retries": 0})
    played.servers[0].script = lambda request: Reply(status=500)

    with pytest.raises(PromptFailedError, match=r"prompt 0 failed 1 times .*rollout_000: ServerFailedError"):
        played.play()


def test_a_request_that_the_server_refuses_ends_the_run_at_once(tmp_path: Path) -> None:
    played = scene(tmp_path, launch={"evaluate": False})
    played.servers[0].script = lambda request: Reply(status=400)

    with pytest.raises(RequestRefusedError, match="HTTP 400: scripted failure"):
        played.play()
    assert len(played.training_requests()) == 1


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
    played.trainer._serve(0)
    assert changed.wait(10)
    for server in played.servers:
        server.version = 1
    for step in range(3):
        played.trainer._step(step)


def test_a_server_that_answers_with_older_weights_than_it_proved_is_not_believed(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=2, launch={"evaluate": False}, rollout={"max_retries": 0})

    def age(answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            choice["version_segments"] = [[0, len(choice["token_ids"])]]

    played.servers[0].script = lambda request: Reply(change=age)

    with pytest.raises(PromptFailedError, match="answered with weights of version 0, although it proved version 1"):
        played.play()


def test_an_evaluation_with_tokens_of_another_version_fails(tmp_path: Path) -> None:
    played = scene(tmp_path)

    def renew(answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            choice["version_segments"] = [[7, len(choice["token_ids"])]]

    played.servers[0].script = lambda request: Reply(change=renew)

    with pytest.raises(EvaluationError, match="tokens of version 7 in the evaluation of version 0"):
        played.play()


def test_a_batch_that_does_not_fill_in_time_says_what_it_waits_for(tmp_path: Path) -> None:
    played = scene(
        tmp_path,
        launch={"evaluate": False},
        global_resource_planner={"runtime_batch_collection_timeout_s": 1.0},
    )
    played.servers[0].script = lambda request: Reply(delay_s=3.0)

    with pytest.raises(
        BatchCollectionTimeoutError, match=r"batch 0 has 0 of 4 groups .*4 in flight .*rollout_000 \(ready; 8 traj"
    ):
        played.play()


def test_a_trainer_that_falls_silent_is_named_with_what_it_owes(tmp_path: Path) -> None:
    played = scene(tmp_path, launch={"evaluate": False}, algorithm={"step_timeout_s": 1.0})
    played.trainer.silent_at = 1

    with pytest.raises(TrainerSilentError, match=r"step_000001/trained.json from the trainer; steps trained 1"):
        played.play()


def test_a_run_whose_weights_are_never_served_says_so(tmp_path: Path) -> None:
    played = scene(tmp_path, rollout={"ready_timeout_s": 1.0}, weights={"refresh_timeout_s": 1.0})

    with serving(played.servers), played.context() as context:
        with pytest.raises(WaitTimeoutError, match=r"v000000.json .*from the trainer") as caught:
            stage.run(context)
    assert "rollout_000 (ready)" in caught.value.__notes__[0]


def test_a_stop_request_in_the_middle_ends_the_stage_within_its_grace(tmp_path: Path) -> None:
    played = scene(tmp_path)
    played.servers[0].script = lambda request: Reply(delay_s=30.0 if request.number == 2 else 0.0)

    with serving(played.servers), training(played.trainer), played.context() as context:
        stopper = threading.Thread(target=_stop_when_generating, args=(played, context), daemon=True)
        stopper.start()
        with pytest.raises(StoppedError):
            stage.run(context)
        stopper.join()
        assert time.monotonic() - played.stopped_s < context.config.launch.stop_grace_s

    assert played.run.read(played.run.summary_json) is None
    desired = read_desired(played.run)
    assert desired is not None
    assert desired.phase == "run"


def _stop_when_generating(played: Scene, context: StageContext) -> None:
    until(lambda: len(played.training_requests()) > 0)
    played.stopped_s = time.monotonic()
    context.stop.set()


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


def test_a_wrong_token_is_refused_by_the_server_and_ends_the_run(tmp_path: Path) -> None:
    played = scene(tmp_path)
    played.run.token_file.write_text("another token\n")

    with pytest.raises(RequestRefusedError, match="HTTP 401"):
        played.play()


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
