"""The trainer stage against the run directory: four ranks, one instance and a controller played by this test.

The instance loads each published folder with transformers, so a version that it acknowledges is one that an independent
program can read; the controller's batches carry that model's log-probs as the behaviour policy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from conf.schema import GlobalResourcePlannerConfig, LibraConfig
from conf.sections import AlgorithmConfig, HardwareConfig, WeightsConfig
from launch.unread import might_read
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.batches import Batch, Sequence, write_batch
from stages.files import list_names, wait_for
from stages.rundir import RunDir
from stages.trainer.parallel import batch_timeout_s, collective_timeout_s
from stages.weights import apply, reader
from stages.weights.manifest import Manifest
from stages.weights.records import Loaded, Prepared, Proof

TP, DP = 2, 2
RANKS = TP * DP
INSTANCE = "rollout_000"
WAIT_S = 100.0
VOCAB = 40
STEPS_SERVED = 2  # batches 0 and 1; the ranks are stopped while they wait for batch 2
BATCH_TIMEOUT_S = 8.0  # version 1 is acknowledged later than that


@dataclass
class Story:
    """What happened, for the tests to look at."""

    run: RunDir
    manifests: list[Manifest] = field(default_factory=list)
    probe_differences: list[float] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    output: str = ""

    def receipt(self, step: int) -> dict[str, Any]:
        record = self.run.read(self.run.batch(step) / "trained.json")
        assert record is not None
        return record


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    run = make_run(tmp_path_factory.mktemp("stage"))
    script = Path(__file__).with_name("trainer_ranks.py")
    trainer = subprocess.Popen(
        [sys.executable, str(script), str(run.root), str(RANKS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    told = Story(run)
    try:
        for version in range(STEPS_SERVED + 1):
            if version == 1:
                time.sleep(BATCH_TIMEOUT_S + 1.0)
            policy = serve(told, version, trainer)
            if version < STEPS_SERVED:
                write_batch(run, version, generated_batch(policy, version))
        trainer.send_signal(signal.SIGTERM)
        told.output = trainer.communicate(timeout=WAIT_S)[0]
    finally:
        trainer.kill()
        trainer.wait()
    told.exit_codes = json.loads(told.output.splitlines()[-1])
    return told


def make_run(root: Path) -> RunDir:
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
        )
    )
    model.save_pretrained(root / "model")
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "tokenizer.json").write_text("{}")
    run = RunDir.create(root / "run")
    config = LibraConfig(
        model_path=str(root / "model"),
        tokenizer_path=str(root / "tokenizer"),
        train_gpus=RANKS,
        train_tp_size=TP,
        train_dtype="float32",
        total_steps=5,
        max_head_offpolicyness=0,
        learning_rate=1e-2,
        micro_batch_size=3,
        hardware=HardwareConfig(device="cpu"),
        global_resource_planner=GlobalResourcePlannerConfig(runtime_batch_collection_timeout_s=BATCH_TIMEOUT_S),
        algorithm=AlgorithmConfig(lr_schedule="linear"),
        weights=WeightsConfig(dtype="float32", proof_tolerance=1e-3),
    )
    OmegaConf.save(OmegaConf.create(asdict(config)), run.config_yaml)
    rollout = RolloutLayout(1, 1, 1, (InstancePlacement(INSTANCE, 1, 1, 0),))
    plan = Plan("hetjob", "test", "cpu", TrainLayout(RANKS, 1, RANKS, TP, 1, 1, DP, 3), rollout)
    run.write(run.plan_json, plan.to_dict())
    return run


def serve(told: Story, version: int, trainer: subprocess.Popen[str]) -> LlamaForCausalLM:
    """Play the instance: take the request for `version`, verify, load, prove, acknowledge; wait until it counts."""
    agent = RunDir.open(told.run.root, writer=INSTANCE, attempt=0)

    def check() -> None:
        assert trainer.poll() is None, trainer.communicate()[0]

    request = wait_for(
        lambda: apply.pending_request(agent, INSTANCE, version - 1),
        deadline_s=WAIT_S,
        awaited=f"request {version}",
        from_whom="the trainer",
        check=check,
    )
    manifest = reader.load_manifest(agent, version, request.digest)
    reader.verify(agent, manifest)
    policy = LlamaForCausalLM.from_pretrained(agent.weights_version(version), dtype=torch.float32)
    ids = list(manifest.probe.token_ids)
    difference = np.abs(np.array(sequence_logprobs(policy, ids)) - np.array(manifest.probe.logprobs)).max()
    told.manifests.append(manifest)
    told.probe_differences.append(float(difference))
    proof = Proof(float(difference), 1e-3, len(ids) - 1)
    apply.write_prepared(agent, Prepared(INSTANCE, version, manifest.digest, manifest.weight_bytes, 0.0, "test"))
    times: dict[str, Any] = dict.fromkeys(
        ("lock_wait_s", "process_stop_s", "model_load_s", "total_reload_s", "paused_s", "prepare_s"), 0.0
    )
    answer = Loaded(
        instance=INSTANCE,
        version=version,
        digest=manifest.digest,
        method=request.method,
        strategy=request.strategy,
        proof=proof,
        host="test",
        server_response={},
        **times,
    )
    apply.write_loaded(agent, answer)
    wait_for(
        lambda: f"v{version:06d}.json" in list_names(agent.refreshed) or None,
        deadline_s=WAIT_S,
        awaited=f"refreshed {version}",
        from_whom="the trainer",
        check=check,
    )
    return policy


def sequence_logprobs(policy: LlamaForCausalLM, ids: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = policy(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    values: list[float] = logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
    return values


def generated_batch(policy: LlamaForCausalLM, version: int) -> Batch:
    """Ten sequences of `policy`: the reward is the share of even tokens."""
    rng = np.random.default_rng(version)
    rows = []
    for index in range(10):
        prompt = rng.integers(0, VOCAB, 2).tolist()
        response = rng.integers(0, VOCAB, int(rng.integers(2, 7))).tolist()
        logprobs = sequence_logprobs(policy, prompt + response)[1:]
        reward = float(np.mean([token % 2 == 0 for token in response]))
        rows.append(
            Sequence.of_completion(
                prompt,
                response,
                logprobs,
                [version] * len(response),
                reward=reward,
                advantage=reward - 0.5,
                group_id=index,
            )
        )
    return Batch.pack(rows)


def test_each_version_is_the_one_that_transformers_reads_from_its_folder(story: Story) -> None:
    assert [manifest.version for manifest in story.manifests] == [0, 1, 2]
    assert max(story.probe_differences) < 1e-5


def test_ranks_that_hold_columns_write_rows(story: Story) -> None:
    parts = story.manifests[1].tensors["model.layers.0.mlp.down_proj.weight"].parts

    assert [(part.start, part.shape) for part in parts] == [((0, 0), (16, 64)), ((16, 0), (16, 64))]


def test_every_step_changes_the_weights(story: Story) -> None:
    probes = [manifest.probe.logprobs for manifest in story.manifests]
    assert np.abs(np.diff(np.array(probes), axis=0)).max(axis=1).min() > 1e-3


def test_the_receipt_tells_what_the_step_did(story: Story) -> None:
    receipt = story.receipt(1)

    assert (receipt["step"], receipt["version"]) == (1, 2)
    assert receipt["learning_rate"] == pytest.approx(1e-2 * 4 / 5)
    assert receipt["grad_norm"] > 0
    assert receipt["logprob_difference_max"] < 1e-5, "the sampler's log-probs are those of the same weights"
    assert receipt["clip_fraction"] == 0
    assert set(receipt["seconds"]) == {
        "wait_for_batch",
        "recompute_logprobs",
        "grpo_update",
        "publish_weights",
        "wait_acks",
    }
    assert all(seconds > 0 for seconds in receipt["seconds"].values())


def test_slow_instances_do_not_use_up_any_rank_s_time_for_a_batch(story: Story) -> None:
    assert story.receipt(0)["seconds"]["wait_acks"] > BATCH_TIMEOUT_S
    assert story.receipt(1)["seconds"]["wait_for_batch"] < BATCH_TIMEOUT_S


@pytest.mark.parametrize(
    ("method", "strategy", "starts"), [("inplace", "parallel", 1), ("restart", "parallel", 2), ("restart", "serial", 4)]
)
def test_a_collective_waits_longer_than_anything_that_one_rank_waits_for(
    method: str, strategy: str, starts: int
) -> None:
    config = LibraConfig(rollout_weight_reload_method=method, rollout_weight_reload_strategy=strategy)
    instances = tuple(InstancePlacement(f"rollout_{n:03d}", 1, 1, 0) for n in range(3))
    context = SimpleNamespace(config=config, plan=SimpleNamespace(rollout=SimpleNamespace(instances=instances)))

    limit_s = collective_timeout_s(context)  # type: ignore[arg-type]

    assert limit_s > config.weights.refresh_timeout_s + starts * config.rollout.ready_timeout_s
    assert limit_s > batch_timeout_s(config, step=0) > batch_timeout_s(config, step=1)


def test_ranks_that_are_asked_to_stop_leave_together(story: Story) -> None:
    assert story.exit_codes == [3] * RANKS, story.output


def test_what_each_rank_reads_is_recorded_and_known_from_its_code(story: Story) -> None:
    for rank in range(RANKS):
        record = story.run.read(story.run.reads_json("trainer", rank))
        assert record is not None
        assert {"learning_rate", "micro_batch_size", "weights.dtype"} <= set(record["options"])
        assert set(record["options"]) <= might_read("trainer")


def test_each_rank_leaves_a_trace_of_its_phases(story: Story) -> None:
    for rank in range(RANKS):
        lines = (story.run.traces / f"phase_trace_rank{rank:04d}.trainer.jsonl").read_text().splitlines()
        phases = {record["phase"] for record in map(json.loads, lines) if record["event"] == "phase_span"}
        wanted = {"set_up", "step", "wait_for_batch", "recompute_logprobs", "grpo_update", "publish_weights"}
        assert wanted | ({"wait_acks"} if rank == 0 else set()) <= phases


def test_a_replayed_batch_gives_the_same_loss_and_gradient_on_one_rank(story: Story) -> None:
    before = sorted(story.run.root.rglob("*.json"))
    command = [sys.executable, "-m", "stages.trainer", str(story.run.root), "--replay", "step_000001"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    assert done.returncode == 0, done.stderr
    replayed, receipt = json.loads(done.stdout), story.receipt(1)
    assert replayed["loss"] == pytest.approx(receipt["loss"], rel=1e-4, abs=1e-7)
    assert replayed["grad_norm"] == pytest.approx(receipt["grad_norm"], rel=1e-4)
    assert sorted(story.run.root.rglob("*.json")) == before


@pytest.mark.exercises("tokenizer_path")
def test_every_version_carries_the_tokenizer_that_is_not_the_model_s(story: Story) -> None:
    assert all("tokenizer.json" in manifest.files for manifest in story.manifests)
