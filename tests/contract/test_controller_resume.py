"""The controller of a run that was cut off: in a new attempt, and started again within one."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stages.batches import read_batch
from stages.context import StoppedError
from stages.controller import stage
from stages.controller.ledger import read_ledgers
from stages.desired import read_desired
from stages.rundir import RunDir
from stages.stopping import StopRequest, write_stop_request
from tests.controller_kit import Reply, Request, serving, training, until
from tests.controller_scene import Scene, next_attempt, scene, staleness_of

STOP = StopRequest("checkpoint", "time limit", 30.0)


def play_until(played: Scene, step: int, **options: Any) -> dict[str, Any] | None:
    """Let the controller be killed (`stop=None`) or asked to stop while the trainer holds `step`; returns its result."""
    stop: StopRequest | None = options.get("stop")
    with serving(played.servers), played.context() as context:

        def interrupt(reached: int) -> None:
            if reached < step:
                return
            # Everything that may run ahead has come to rest, so that all plays of the test are the same.
            ahead = min(reached + context.config.max_head_offpolicyness, context.config.total_steps - 1)
            until(lambda: num_reported(played) == reached - played.trainer.start)
            until(lambda: ahead in played.run.published_batches() and not in_flight(played))
            if stop is None:
                context.stop.set()
            else:
                write_stop_request(
                    RunDir(context.run.root, context.run.run_id, context.run.attempt, "supervisor"), stop
                )
            until(lambda: played.trainer.stop.is_set())
            raise InterruptedError

        played.trainer.before_step = interrupt
        with training(played.trainer):
            try:
                return stage.run(context)
            except StoppedError:
                return None


def in_flight(played: Scene) -> bool:
    return bool(read_ledgers(played.run).in_flight)


def num_reported(played: Scene) -> int:
    return len(played.steps()) if played.run.metrics_jsonl.exists() else 0


def asked(played: Scene) -> list[int]:
    return sorted(int(prompt) for request in played.training_requests() for prompt in request.prompts)


def test_recorded_batches_are_trained_again_as_they_are_and_nothing_is_generated_twice(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=4, max_head_offpolicyness=1)
    play_until(played, 2)
    recorded = {step: read_batch(played.run, step) for step in played.run.published_batches()}
    again = next_attempt(played, start=1)

    summary = again.play()

    assert sorted(recorded) == [0, 1, 2, 3]
    assert [manifest.xxh3_128 for _, manifest in again.trainer.batches] == [
        found[1].xxh3_128 for step, found in sorted(recorded.items()) if found is not None and step >= 1
    ]
    assert again.training_requests() == []
    assert (summary["steps"], summary["attempts"], summary["steps_trained_again"]) == (4, 2, 1)


def test_prompts_in_flight_and_of_lost_batches_are_asked_first_and_none_is_skipped(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=4, max_head_offpolicyness=1, launch={"evaluate": False})
    play_until(played, 1)
    for step in (1, 2):
        (played.run.batch(step) / "batch.safetensors").unlink()
    again = next_attempt(played, start=1)

    again.play()

    assert asked(again) == list(range(14, 26))
    assert again.training_requests()[0].prompts == [str(prompt) for prompt in range(14, 22)]
    state = read_ledgers(again.run)
    assert sorted(prompt for prompts in state.prompts.values() for prompt in prompts) == list(range(16))
    assert state.next_prompt == 16


def test_the_evaluation_before_training_is_not_repeated(tmp_path: Path) -> None:
    played = scene(tmp_path)
    play_until(played, 1)
    again = next_attempt(played, start=1)

    summary = again.play()

    evaluations = [line["when"] for line in again.lines() if line.get("event") == "evaluation"]
    assert evaluations == ["before", "after"]
    assert (summary["reward_before"], summary["reward_after"]) == (1.0, 1.0)
    assert summary["phase_s"]["evaluate_before"] == 0.0


def test_metrics_have_one_line_for_each_step_that_counts(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=4, max_head_offpolicyness=1, launch={"evaluate": False})
    play_until(played, 2)
    again = next_attempt(played, start=1)

    summary = again.play()

    marks = [(line.get("event"), line.get("step", line.get("from_step"))) for line in again.lines()]
    assert marks == [(None, 0), (None, 1), ("resumed", 1), (None, 1), (None, 2), (None, 3)]
    assert summary["response_tokens"] == sum(line["response_tokens"] for line in again.lines()[-3:]) * 4 // 3
    assert summary["phase_s"]["grpo_update"] == pytest.approx(0.8)
    assert len(summary["weight_refresh_s"]) == 5


def test_phases_of_all_attempts_add_up_to_the_wall_time(tmp_path: Path) -> None:
    played = scene(tmp_path)
    play_until(played, 1)

    summary = next_attempt(played, start=1).play()

    names = ("earlier_attempts", "start_up", "evaluate_before", "steps", "evaluate_after")
    assert sum(summary["phase_s"][name] for name in names) == pytest.approx(summary["wall_s"], abs=0.01)


def test_a_step_that_was_trained_but_not_reported_is_reported_late(tmp_path: Path) -> None:
    played = scene(tmp_path, launch={"evaluate": False})
    play_until(played, 1)
    played.run.metrics_jsonl.write_text("")

    next_attempt(played, start=1).play()

    assert [line["step"] for line in played.steps()] == [0, 1, 2]
    assert 0.1 < played.steps()[0]["step_s"] < 1.0


def test_staleness_holds_right_after_a_resume(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=6, max_head_offpolicyness=1, launch={"evaluate": False})
    play_until(played, 3)
    again = next_attempt(played, start=2)

    again.play()

    ages = [step + again.trainer.start for step in range(len(again.trainer.batches))]
    oldest = [batch.oldest_version for batch, _ in again.trainer.batches]
    assert max(step - version for step, version in zip(ages, oldest, strict=True)) <= 1
    assert max(staleness_of(played)) <= 1
    assert max(again.trainer.on_disk) <= 4  # two that may run ahead, and the recorded ones


def test_no_prompt_leaves_before_all_instances_have_proved_the_version_in_this_attempt(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=3, launch={"evaluate": False})
    play_until(played, 2)
    left = played.run.read(played.run.refreshed_json(2))
    shutil.rmtree(played.run.batch(2))
    again = next_attempt(played, start=2)
    begin, asked_before = again.trainer.begin, []

    def begin_late() -> None:
        again.trainer.run.write(again.run.start_json, {"step": 2})
        until(lambda: len(again.run.ledger_files()) == 2)  # the controller is ready
        asked_before.append(asked(again))
        begin()

    again.trainer.begin = begin_late  # type: ignore[method-assign]
    again.play()

    assert left is not None, "the first attempt had proved the version that the second starts from"
    assert asked_before == [[]]
    assert asked(again) == [18, 19, 20, 21]


def test_receipts_of_an_older_attempt_do_not_count(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=4, max_head_offpolicyness=1, launch={"evaluate": False})
    play_until(played, 3)
    again = next_attempt(played, start=1)
    reached: list[int] = []

    def look(step: int) -> None:
        reached.append(step)
        time.sleep(0.1)
        assert read_ledgers(again.run).trained_steps == step

    again.trainer.before_step = look
    again.play()

    assert reached == [1, 2, 3]


def test_a_controller_that_is_started_again_goes_on_where_the_trainer_is(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=4, max_head_offpolicyness=1)
    killed = threading.Event()

    def hold(step: int) -> None:
        if step == 2:
            until(killed.is_set)

    played.trainer.before_step = hold
    with serving(played.servers), training(played.trainer):
        with played.context() as context:
            threading.Thread(target=_stop_at, args=(played, context.stop, 2), daemon=True).start()
            with pytest.raises(StoppedError):
                stage.run(context)
        killed.set()
        with played.context() as context:
            summary = stage.run(context)

    assert played.trainer.error is None
    assert summary["steps"] == 4
    assert sorted(path.name for path in played.run.ledger.iterdir()) == ["attempt_000.1.jsonl", "attempt_000.jsonl"]
    state = read_ledgers(played.run)
    assert sorted(prompt for prompts in state.prompts.values() for prompt in prompts) == list(range(16))
    assert set(asked(played)) == set(range(10, 26))
    assert [line["step"] for line in played.steps()] == [0, 1, 2, 3]
    assert [line["when"] for line in played.lines() if line.get("event") == "evaluation"] == ["before", "after"]


def _stop_at(played: Scene, stop: threading.Event, trained: int) -> None:
    until(lambda: num_reported(played) == trained)
    stop.set()


# ---- the request to stop -----------------------------------------------------------------------------------------


def test_a_stop_request_ends_the_controller_with_its_step(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=4, launch={"evaluate": False})

    result = play_until(played, 2, stop=STOP)

    assert result == {"stopped_at": 2}
    desired = read_desired(played.run)
    assert desired is not None
    assert desired.phase == "run"
    assert played.run.read(played.run.summary_json) is None


def test_a_stop_request_cancels_what_is_in_flight_and_it_is_asked_again_later(tmp_path: Path) -> None:
    played = scene(tmp_path, total_steps=2, launch={"evaluate": False})
    played.servers[0].script = lambda request: Reply(delay_s=30.0 if "14" in request.prompts else 0.0)

    with serving(played.servers), training(played.trainer), played.context() as context:
        threading.Thread(target=_request_when_asked, args=(played, "14"), daemon=True).start()
        began = time.monotonic()
        assert stage.run(context) == {"stopped_at": 1}
        assert time.monotonic() - began < 10.0
    assert sorted(ask.prompt for ask in read_ledgers(played.run).in_flight.values()) == [4, 5, 6, 7]
    again = next_attempt(played, start=1)
    again.play()

    assert asked(again) == [14, 15, 16, 17]


def _request_when_asked(played: Scene, prompt: str) -> None:
    def is_asked() -> bool:
        return any(prompt in request.prompts for request in played.training_requests())

    until(is_asked)
    until(lambda: len(played.steps()) == 1)
    write_stop_request(RunDir(played.run.root, played.run.run_id, 0, "supervisor"), STOP)


def test_a_stop_request_is_noticed_while_the_servers_start(tmp_path: Path) -> None:
    played = scene(tmp_path)
    write_stop_request(RunDir(played.run.root, played.run.run_id, 0, "supervisor"), STOP)

    with played.context() as context:
        assert stage.run(context) == {"stopped_at": 0}


def test_a_stop_request_of_an_older_attempt_does_not_count(tmp_path: Path) -> None:
    played = scene(tmp_path, launch={"evaluate": False})
    play_until(played, 1, stop=STOP)

    assert next_attempt(played, start=1).play()["steps"] == 3


# ---- nothing left ------------------------------------------------------------------------------------------------


def test_a_run_that_is_over_says_so_and_ends_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played = scene(tmp_path)
    played.play()
    again = next_attempt(played, start=3)
    again.trainer.run.write(again.run.start_json, {"step": 3})

    with again.context() as context:  # no server and no trainer is there
        result = stage.run(context)

    message = "nothing left to train: checkpoint is at step 3 of 3"
    assert result == {"steps": 3, "message": message}
    assert message in capsys.readouterr().out
    desired = read_desired(again.run)
    assert desired is not None
    assert (desired.phase, desired.outcome, desired.reason) == ("stop", "success", message)


def test_a_run_that_died_in_its_last_evaluation_makes_up_for_it(tmp_path: Path) -> None:
    played = scene(tmp_path)
    refused = threading.Event()

    def script(request: Request) -> Reply:
        if request.prompts[0].startswith("00") and len(played.trainer.batches) == 3:
            refused.set()
            return Reply(status=400)
        return Reply()

    played.servers[0].script = script
    with pytest.raises(RuntimeError, match="HTTP 400"):
        played.play()
    again = next_attempt(played, start=3)

    summary = again.play()

    assert refused.is_set()
    assert (summary["steps"], summary["reward_before"], summary["reward_after"]) == (3, 1.0, 1.0)
    assert again.training_requests() == []
