"""The demo on this machine, short: a whole run, and what happens when one of its processes is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.files import list_names
from stages.rundir import RunDir
from tests.system_kit import DEATH_DEADLINE_S, SystemRun, launched, metrics
from traces.run import RunTrace

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
TOTAL_STEPS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SystemRun:
    """Without staleness, so that every token of a batch comes from the weights that it trains."""
    run_dir = tmp_path_factory.mktemp("local") / "run"
    with launched(run_dir, f"total_steps={TOTAL_STEPS}", "task.test_size=50", "max_head_offpolicyness=0") as run:
        run.wait_for_step(0)
        assert run.wait(200) == 0, run.output()
    return run


def test_a_short_demo_ends_with_a_complete_summary(finished: SystemRun) -> None:
    summary = finished.record("summary.json")

    wanted = {
        *("reward_before", "reward_after", "sampled_before", "sampled_after", "steps", "wall_s"),
        *("phase_s", "weight_refresh_s", "checkpoint", "attempts"),
    }
    assert wanted <= set(summary)
    assert (summary["steps"], summary["attempts"]) == (TOTAL_STEPS, 1)
    assert len(summary["weight_refresh_s"]) == TOTAL_STEPS + 1


def test_a_short_demo_leaves_no_process_and_no_port(finished: SystemRun) -> None:
    finished.assert_nothing_is_left()


def test_transformers_loads_the_final_checkpoint(finished: SystemRun) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = finished.record("summary.json")["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    ids = tokenizer("spell this word backward (example: sun -> nus): word", return_tensors="pt")
    assert model.generate(input_ids=ids["input_ids"], max_new_tokens=4).shape[1] > ids["input_ids"].shape[1]


def test_vllm_and_trainer_agree_on_every_token_at_every_version(finished: SystemRun) -> None:
    receipts = [finished.record(f"batches/step_{step:06d}/trained.json") for step in range(TOTAL_STEPS)]

    assert all(receipt["fresh_tokens"] > 1000 for receipt in receipts)
    assert max(receipt["logprob_difference_max"] for receipt in receipts) < 1e-3


def test_every_version_was_acknowledged_with_a_proof(finished: SystemRun) -> None:
    for version in range(TOTAL_STEPS + 1):
        ack = finished.record(f"control/acks/v{version:06d}/rollout_000.loaded.json")
        assert ack["proof"]["max_difference"] <= ack["proof"]["tolerance"] <= 1e-3


def test_a_run_keeps_only_its_newest_weights(finished: SystemRun) -> None:
    run = RunDir.open(finished.run_dir, writer="test")

    assert TOTAL_STEPS in run.published_versions()
    assert len(run.published_versions()) <= 4


def test_metrics_hold_every_step_and_both_evaluations(finished: SystemRun) -> None:
    lines = metrics(finished.run_dir)

    assert [line["step"] for line in lines if "event" not in line] == list(range(TOTAL_STEPS))
    assert [line["version"] for line in lines if line.get("event") == "evaluation"] == [0, TOTAL_STEPS]


def test_the_trace_of_a_run_has_all_three_stages(finished: SystemRun) -> None:
    roles = {process.role for process in RunTrace(finished.run_dir).processes()}

    assert {"controller", "rollout", "trainer"} <= roles


def test_nothing_of_a_run_is_readable_by_others_and_the_token_is_in_no_log(finished: SystemRun) -> None:
    everything = [finished.run_dir, *finished.run_dir.rglob("*")]
    assert [path for path in everything if not path.is_symlink() and path.stat().st_mode & 0o077] == []
    token = (finished.run_dir / "token").read_text().strip()

    logs = "".join(path.read_text(errors="replace") for path in (finished.run_dir / "attempts/0/logs").iterdir())
    assert token not in logs


def test_the_token_is_on_no_command_line(finished: SystemRun) -> None:
    token = (finished.run_dir / "token").read_text().strip()

    assert any("stages.rollout.server" in line for line in finished.command_lines)
    assert [line for line in finished.command_lines if token in line] == []


def test_a_run_on_one_node_listens_on_loopback_only(finished: SystemRun) -> None:
    assert finished.ports <= {port for _, port in finished.listening}
    assert {address for address, _ in finished.listening} == {"127.0.0.1"}


def kill_supervisor(run: SystemRun) -> None:
    os.kill(run.record("attempts/0/state.json")["pid"], signal.SIGKILL)


def kill_server(run: SystemRun) -> None:
    os.kill(run.record("instances/rollout_000.json")["server_pid"], signal.SIGKILL)


def kill_stage(name: str) -> Callable[[SystemRun], None]:
    def kill(run: SystemRun) -> None:
        os.kill(run.stage_pids(name)[0], signal.SIGKILL)

    return kill


@pytest.mark.parametrize(
    ("kill", "wanted"),
    [(kill_stage("trainer"), "trainer: killed by SIGKILL"), (kill_supervisor, "supervisor")],
    ids=["trainer", "supervisor"],
)
def test_a_killed_process_ends_the_run_with_its_name_and_leaves_nothing(
    tmp_path: Path, kill: Callable[[SystemRun], None], wanted: str
) -> None:
    with launched(tmp_path / "run", "total_steps=1000", "launch.evaluate=false") as run:
        run.wait_for_step(1)

        kill(run)

        assert run.wait(DEATH_DEADLINE_S) != 0
        assert wanted in run.output()
        run.assert_nothing_is_left()


def test_a_killed_server_is_replaced_at_the_newest_version_and_the_run_goes_on(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "total_steps=1000", "launch.evaluate=false") as run:
        run.wait_for_step(1)
        version = run.newest_version()

        kill_server(run)

        run.wait_until("another start of the instance", lambda: run.instance("rollout_000")["incarnation"] == 1)
        run.wait_until("its proof", lambda: run.instance("rollout_000")["version"] >= version)
        run.wait_for_step(run.newest_step() + 3)
        assert run.dropped() <= {"interrupted"}
        run.end()
        run.assert_nothing_is_left()


def test_a_killed_controller_goes_on_where_it_was(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "total_steps=1000", "launch.evaluate=false") as run:
        run.wait_for_step(1)

        kill_stage("controller")(run)

        run.wait_until("another ledger", lambda: (run.run_dir / "ledger/attempt_000.1.jsonl").exists())
        run.wait_for_step(run.newest_step() + 3)
        run.end()
        run.assert_nothing_is_left()


def flip_last_byte(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def test_one_flipped_byte_is_refused_by_name_and_the_run_says_so(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "total_steps=1000", "launch.evaluate=false") as run:
        run.wait_for_step(0)
        agent = run.wait_until("an agent that rests", lambda: agent_stopped_at_rest(run))
        version = run.wait_until("a request that nobody answers", lambda: unanswered_version(run))
        flip_last_byte(run.run_dir / f"weights/v{version:06d}/model.safetensors")

        os.kill(agent, signal.SIGCONT)

        assert run.wait(DEATH_DEADLINE_S) != 0
        nack = run.record(f"control/acks/v{version:06d}/rollout_000.nack.json")
        assert nack["tensor"] in run.output()
        assert nack["serving_version"] == version - 1
        run.assert_nothing_is_left()


def agent_stopped_at_rest(run: SystemRun) -> int | None:
    """Stopped in the middle of a refresh it would be missed, and replaced, before the next request."""
    agent = int(run.instance("rollout_000")["agent_pid"])
    os.kill(agent, signal.SIGSTOP)
    if RunDir.open(run.run_dir, writer="test").ack_json(newest_request(run), "rollout_000", "loaded").exists():
        return agent
    os.kill(agent, signal.SIGCONT)
    return None


def newest_request(run: SystemRun) -> int:
    return max(int(name[1:7]) for name in list_names(run.run_dir / "control/requests"))


def unanswered_version(run: SystemRun) -> int | None:
    newest = newest_request(run)
    return None if list_names(run.run_dir / f"control/acks/v{newest:06d}") else newest
