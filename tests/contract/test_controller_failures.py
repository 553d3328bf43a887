"""What the controller does about servers, trainers and prompts that fail, and when it is asked to stop."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stages.context import StageContext, StoppedError
from stages.controller import stage
from stages.controller.client import RequestRefusedError
from stages.controller.dispatcher import PromptFailedError
from stages.controller.evaluation import EvaluationError
from stages.controller.ledger import read_ledger
from stages.controller.loop import BatchCollectionTimeoutError
from stages.controller.progress import TrainerSilentError
from stages.desired import read_desired
from stages.files import WaitTimeoutError
from tests.controller_kit import (
    Reply,
    Request,
    serving,
    training,
    until,
)
from tests.controller_scene import Scene, scene


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


@pytest.mark.exercises("global_resource_planner.runtime_batch_collection_timeout_s")
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


def hang_once(played: Scene, *, groups: int = 1) -> None:
    """The first training requests never come back; later ones do."""
    hung: list[int] = []

    def script(request: Request) -> Reply:
        if len(hung) < groups and not request.prompts[0].startswith("00"):
            hung.append(request.number)
            return Reply(delay_s=60.0)
        return Reply()

    for server in played.servers:
        server.script = script


RETRYING = {"runtime_batch_collection_timeout_s": 1.0, "runtime_batch_collection_max_retries": 1}


@pytest.mark.exercises("global_resource_planner.runtime_batch_collection_max_retries")
def test_a_batch_that_hangs_is_collected_again_without_what_hung(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = scene(
        tmp_path,
        launch={"evaluate": False},
        rollout={"request_tokens": 1, "request_timeout_s": 60.0},
        global_resource_planner=RETRYING,
    )
    hang_once(played)

    summary = played.play()

    state = read_ledger(played.run.ledger / "attempt_000.jsonl")
    trained = [group for groups in state.batches.values() for group in groups]
    assert summary["groups"] == {"issued": 13, "dropped": {"timeout": 1}}
    assert sorted(trained) == sorted(set(range(13)) - {0})  # group 0 hung; its prompt was asked again as another group
    assert [request.prompts for request in played.training_requests()].count(["10"]) == 2
    assert state.next_prompt == 12  # no prompt was skipped
    assert not state.in_flight
    printed = [line for line in capsys.readouterr().out.splitlines() if "retry" in line]
    assert len(printed) == 1
    assert "batch 0 has 3 of 4 groups after 1 s" in printed[0]
    assert "1 in flight (prompt 0 for" in printed[0]
    assert "instances: rollout_000 (ready; 2 trajectories in flight); gave up 1 groups, retry 1 of 1" in printed[0]


def test_finished_groups_outlive_a_retry(tmp_path: Path) -> None:
    played = scene(
        tmp_path,
        total_steps=1,
        launch={"evaluate": False},
        rollout={"request_tokens": 1, "request_timeout_s": 60.0},
        global_resource_planner=RETRYING,
    )
    hang_once(played)

    played.play()

    asked = [prompt for request in played.training_requests() for prompt in request.prompts]
    assert sorted(asked) == ["10", "10", "11", "12", "13"]


def test_prompts_of_a_request_that_hung_travel_alone_afterwards(tmp_path: Path) -> None:
    played = scene(
        tmp_path,
        total_steps=1,
        launch={"evaluate": False},
        rollout={"request_timeout_s": 60.0},
        global_resource_planner=RETRYING,
    )
    hang_once(played)

    played.play()

    assert [len(request.prompts) for request in played.training_requests()] == [4, 1, 1, 1, 1]


def test_every_batch_has_its_own_retries(tmp_path: Path) -> None:
    played = scene(
        tmp_path,
        total_steps=2,
        launch={"evaluate": False},
        rollout={"request_timeout_s": 60.0},
        global_resource_planner=RETRYING,
    )
    first_of_batch = ("10", "14")
    played.servers[0].script = lambda request: Reply(
        delay_s=60.0 if request.prompts[0] in first_of_batch and len(request.prompts) == 4 else 0.0
    )

    summary = played.play()

    assert summary["groups"]["dropped"] == {"timeout": 8}


def test_a_batch_that_hangs_more_often_than_allowed_ends_the_run(tmp_path: Path) -> None:
    played = scene(
        tmp_path,
        launch={"evaluate": False},
        rollout={"request_timeout_s": 60.0},
        global_resource_planner=RETRYING,
    )
    hang_once(played, groups=100)

    with pytest.raises(BatchCollectionTimeoutError, match=r"batch 0 has 0 of 4 groups .*; 1 retries"):
        played.play()


def test_requests_that_are_young_when_a_batch_times_out_are_left_alone(tmp_path: Path) -> None:
    played = scene(
        tmp_path,
        total_steps=1,
        batch_size=12,
        max_concurrent_rollouts=2,  # one of six groups at a time
        launch={"evaluate": False},
        rollout={"request_tokens": 1, "request_timeout_s": 60.0},
        global_resource_planner={**RETRYING, "runtime_batch_collection_timeout_s": 2.0},
    )
    played.servers[0].script = lambda request: Reply(delay_s=0.5)

    summary = played.play()

    assert summary["groups"]["dropped"] == {}


def test_a_trainer_that_falls_silent_is_named_with_what_it_owes(tmp_path: Path) -> None:
    played = scene(tmp_path, launch={"evaluate": False}, algorithm={"step_timeout_s": 1.0})
    played.trainer.silent_at = 1

    with pytest.raises(TrainerSilentError, match=r"step_000001/trained.json from the trainer; steps trained 1"):
        played.play()


def test_a_run_whose_weights_are_never_served_says_so(tmp_path: Path) -> None:
    played = scene(tmp_path, rollout={"ready_timeout_s": 1.0}, weights={"refresh_timeout_s": 1.0})
    played.trainer.run.write(played.run.start_json, {"step": 0})

    with serving(played.servers), played.context() as context:
        with pytest.raises(WaitTimeoutError, match=r"v000000.json .*from the trainer") as caught:
            stage.run(context)
    assert "rollout_000 (ready; at version -1 while the run is at 0)" in caught.value.__notes__[0]


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


def test_a_wrong_token_is_refused_by_the_server_and_ends_the_run(tmp_path: Path) -> None:
    played = scene(tmp_path)
    played.run.token_file.write_text("another token\n")

    with pytest.raises(RequestRefusedError, match="HTTP 401"):
        played.play()


def test_requests_cut_off_by_a_restart_are_repeated_without_blame(tmp_path: Path) -> None:
    played = scene(
        tmp_path,
        total_steps=1,
        rollout_weight_reload_method="restart",
        launch={"evaluate": False},
        rollout={"max_retries": 0},
    )
    server = played.servers[0]

    def script(request: Request) -> Reply:
        if request.number > 0:
            return Reply()
        server.state = "reloading"
        server.register()
        return Reply(status=0)

    def come_back() -> None:
        path = played.run.ledger / "attempt_000.jsonl"
        until(lambda: path.exists() and read_ledger(path).dropped == 4)
        server.state = "ready"

    server.script = script
    thread = threading.Thread(target=come_back, daemon=True)
    thread.start()
    summary = played.play()
    thread.join()

    assert summary["groups"]["dropped"] == {"interrupted": 4}
