"""What users get wrong, through the same path as the command: exit code 2, no stack trace, and the option to change by name.

The table is the specification: a line for each mistake, with what the message must hold.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import checks
from launch.command_line import run
from launch.errors import ConfigError

GRP = "global_resource_planner"
BASE = ("+experiment=grpo_7b", "launch.mode=slurm", "launch.dry_run=true", "launch.run_dir=/runs/bad")

TYPOS = {
    "an option": (["totl_steps=3"], ["totl_steps", "did you mean 'total_steps'"]),
    "an option behind a plus": (["+totl_steps=3"], ["did you mean 'total_steps'"]),
    "an option of a group": (["algorithm.clip_lo=0.1"], ["did you mean 'algorithm.clip_low'"]),
    "an option without its group": (["clip_low=0.1"], ["did you mean 'algorithm.clip_low'"]),
    "a planner option at top level": (["min_train_gpus=8"], [f"{GRP}.min_train_gpus"]),
    "an option of the published system": (["max_seq_length=4096"], ["max_seq_length"]),
    "an experiment": (["+experiment=grpo_7"], ["grpo_7", "grpo_7b"]),
    "a model": (["model=qwen25_7b"], ["model", "qwen2_5_7b"]),
    "a machine": (["hardware=h100"], ["hardware", "h100_80g"]),
    "an algorithm": (["algorithm=dappo"], ["algorithm", "dapo"]),
    "a task": (["task=countdwn"], ["task", "countdown"]),
    "a group": (["+modle=qwen3_8b"], ["modle", "model"]),
    "a value forgotten": (["total_steps"], ["total_steps"]),
    "an option taken out": (["~total_steps"], ["total_steps"]),
}

TYPES = {
    "a word for a number": (["train_gpus=eight"], ["train_gpus=eight", "whole number"]),
    "half a GPU": (["train_gpus=8.5"], ["train_gpus=8.5", "whole number"]),
    "a word for a switch": (["recompute_logprobs=maybe"], ["recompute_logprobs=maybe", "true or false"]),
    "a number with its unit": (["rollout.request_timeout_s=10min"], ["rollout.request_timeout_s", "a number"]),
    "hours for minutes": (["slurm.time_min=12h"], ["slurm.time_min", "whole number", "min"]),
    "one line for a list": (["slurm.extra=--exclusive"], ["slurm.extra", "list"]),
    "a list for one number": (["train_tp_size=[1,2]"], ["train_tp_size", "whole number"]),
    "nothing for a number": (["batch_size=null"], ["batch_size", "whole number"]),
    "a value for a group": (["rollout=8"], ["rollout"]),
    "a list without quotes": (
        ["rollout.extra_args=[--swap-space=2]"],
        ["rollout.extra_args", 'rollout.extra_args=["--swap-space=2"]'],
    ),
}

RANGES = {
    "a group of one": (["n_samples=1"], ["n_samples=1", "2"]),
    "a fraction above one": (
        ["megatron_optimizer_cpu_offload=true", "megatron_optimizer_offload_fraction=1.5"],
        ["megatron_optimizer_offload_fraction=1.5", "1 "],
    ),
    "per cent for a fraction": (["rollout.gpu_memory_utilization=90"], ["rollout.gpu_memory_utilization=90"]),
    "no number": (["learning_rate=nan"], ["learning_rate=nan"]),
    "a negative seed": (["seed=-1"], ["seed=-1", "0"]),
    "greedy rollouts": (["temperature=0"], ["temperature=0", "0.01"]),
    "no threshold": ([f"{GRP}.train_comm_compute_ratio_threshold=0"], [f"{GRP}.train_comm_compute_ratio_threshold"]),
    "an unknown strategy": (["rollout_weight_reload_strategy=paralel"], ["rollout_weight_reload_strategy", "parallel"]),
    "a backend of the published system": (["train_backend=fsdp"], ["train_backend", "megatron_core"]),
    "a run that never syncs": (["rollout_weight_sync_mode=none"], ["rollout_weight_sync_mode", "restart"]),
    "versions that collide": (["weights.keep_versions=1"], ["weights.keep_versions=1", "2"]),
}

UNITS = {
    "GB for bytes": (["hardware.gpu_memory_bytes=80"], ["hardware.gpu_memory_bytes=80", "80e9"]),
    "Gb/s for bytes/s": (["hardware.network_bytes_per_s=400e9"], ["hardware.network_bytes_per_s", "50e9 bytes/s"]),
    "the published A100 profile": (
        ["hardware=a100_80g", "hardware.network_bytes_per_s=2.0e11"],
        ["hardware.network_bytes_per_s", "bytes/s"],
    ),
    "a bare data-sheet number": (["hardware.network_bytes_per_s=400"], ["hardware.network_bytes_per_s", "50e9"]),
    "TFLOP/s for FLOP/s": (["hardware.gpu_flops=989"], ["hardware.gpu_flops=989", "989e12"]),
    "TB/s for bytes/s": (["hardware.gpu_memory_bytes_per_s=3.35"], ["hardware.gpu_memory_bytes_per_s", "3.35e12"]),
    "GB of a node": (["slurm.mem_per_node_bytes=500"], ["slurm.mem_per_node_bytes=500", "500e9"]),
    "GB of margin": ([f"{GRP}.memory_budget_safety_margin_bytes=2"], [f"{GRP}.memory_budget_safety_margin_bytes", "2e9"]),
}  # fmt: skip

PRODUCTS = {
    "replicas in pieces": (["train_gpus=6", "train_tp_size=4"], ["train_gpus=6", "train_tp_size", "= 4"]),
    "tensor parallelism over nodes": (["train_gpus=16", "train_tp_size=16"], ["train_tp_size=16", "8"]),
    "heads in pieces": (["train_tp_size=8"], ["train_tp_size=8", "28"]),
    "an instance in pieces": (["vllm_tp_size=3"], ["vllm_tp_size=3", "rollout_gpus=8"]),
    "an instance over nodes": (["vllm_tp_size=16", "rollout_gpus=16"], ["vllm_tp_size=16", "8"]),
    "half a node": (["train_gpus=12"], ["train_gpus", "12", "8 or 16"]),
    "groups in pieces": (["batch_size=500"], ["batch_size=500", "n_samples=16", "496"]),
    "less than one group in flight": (["max_concurrent_rollouts=8"], ["max_concurrent_rollouts=8", "n_samples=16"]),
    "ranks without work": (["train_gpus=64", "batch_size=16"], ["batch_size=16", "32"]),
    "a batch too long for the GPU": (
        ["max_model_len=16384", "max_new_tokens=8192"],
        ["GB", "micro_batch_size", "available 71.60"],
    ),
    "a model too big for the GPUs": (["model=qwen2_5_72b", "train_tp_size=8"], ["GB", "train_gpus"]),
    "a model too big for an instance": (
        ["model=qwen2_5_72b", "train_gpus=64", "train_tp_size=8", f"{GRP}.memory_budget_check_enabled=false"],
        ["generating wants", "GB on each GPU", "available 72.00 GB", "vllm_tp_size"],
    ),
    "a share of memory below the model": (
        ["rollout.gpu_memory_utilization=0.1"],
        ["generating wants", "available 8.00 GB", "rollout.gpu_memory_utilization"],
    ),
    "a search for a model too big for an instance": (
        ["model=qwen2_5_72b", f"{GRP}.initial_allocation_strategy=grp"],
        ["generating wants", "vllm_tp_size"],
    ),
    "more context than the model": (["max_model_len=65536"], ["max_model_len=65536", "32768"]),
    "a machine too small": (
        ["+experiment=demo", "launch.mode=local", "rollout_gpus=16"],
        ["rollout_gpus=16", "hardware.gpus_per_node=4"],
    ),
}

CONTRADICTIONS = {
    "no room for a prompt": (["max_new_tokens=4096"], ["max_new_tokens=4096", "max_model_len=4096"]),
    "stale by construction": (["sync_interval=4"], ["max_head_offpolicyness=2", "sync_interval"]),
    "a fraction of nothing": (
        ["megatron_optimizer_offload_fraction=0.5"],
        ["megatron_optimizer_offload_fraction=0.5", "megatron_optimizer_cpu_offload=true"],
    ),
    "offloading nothing": (["megatron_optimizer_cpu_offload=true"], ["megatron_optimizer_offload_fraction"]),
    "offloading from a CPU": (
        ["+experiment=demo", "megatron_optimizer_cpu_offload=true", "megatron_optimizer_offload_fraction=1.0"],
        ["megatron_optimizer_cpu_offload=true", "hardware.device=cpu"],
    ),
    "a nucleus with ratios": (["top_p=0.9"], ["top_p=0.9"]),
    "punishing every answer": (
        ["algorithm=dapo", "algorithm.overlong_buffer_tokens=4096"],
        ["algorithm.overlong_buffer_tokens=4096", "max_new_tokens=3072"],
    ),
    "a floor of a flat schedule": (["algorithm.lr_min_ratio=0.1"], ["algorithm.lr_min_ratio", "algorithm.lr_schedule"]),
    "floors above the given split": ([f"{GRP}.min_rollout_gpus=16"], ["rollout_gpus=8", f"{GRP}.min_rollout_gpus=16"]),
    "floors above the sum": (
        [f"{GRP}.initial_allocation_strategy=grp", f"{GRP}.min_train_gpus=12", f"{GRP}.min_rollout_gpus=8"],
        [f"{GRP}.min_train_gpus=12", f"{GRP}.min_rollout_gpus=8", "train_gpus + rollout_gpus = 16"],
    ),
    "a size that is not allowed": ([f"{GRP}.allowed_train_tp=[4]"], ["train_tp_size=2", f"{GRP}.allowed_train_tp"]),
    "a size named twice": ([f"{GRP}.allowed_train_tp=[2,2]"], [f"{GRP}.allowed_train_tp"]),
    "a request that outlives its batch": (
        ["rollout.request_timeout_s=9000"],
        ["rollout.request_timeout_s=9000", f"{GRP}.runtime_batch_collection_timeout_s"],
    ),
    "a request that cannot end": (["rollout.request_timeout_s=5"], ["rollout.request_timeout_s=5", "max_new_tokens"]),
    "a local run alone": (["launch.mode=local", "launch.follow=false"], ["launch.follow=true"]),
    "an argument of ours for vLLM": (
        ["rollout.extra_args=['--tensor-parallel-size=2']"],
        ["rollout.extra_args", "vllm_tp_size"],
    ),
    "a line of ours for sbatch": (["slurm.extra=['--time=60']"], ["slurm.extra", "slurm.time_min"]),
    "experts of a dense model": (["model.num_experts=64"], ["model.num_experts=64", "model.architecture"]),
    "an exact proof": (["weights.proof_tolerance=0"], ["weights.proof_tolerance=0"]),
}

NOT_BUILT = {
    "pipeline parallelism": (["train_pp_size=2"], ["train_pp_size=2", "not built yet"]),
    "context parallelism": (["train_cp_size=2"], ["train_cp_size=2", "not built yet"]),
    "planning again": (
        [f"{GRP}.runtime_online_replanning=true"],
        [f"{GRP}.runtime_online_replanning", "not built yet"],
    ),
    "moving GPUs": (
        [f"{GRP}.runtime_dynamic_reconfiguration_enabled=true"],
        [f"{GRP}.runtime_dynamic_reconfiguration_enabled", "not built yet"],
    ),
    "grouped GEMM": (
        ["megatron_grouped_gemm=true"],
        ["megatron_grouped_gemm=true", "not built yet; leave it at false"],
    ),
}

TABLE = {
    f"{kind}: {what}": line
    for kind, lines in {
        "typo": TYPOS,
        "type": TYPES,
        "range": RANGES,
        "unit": UNITS,
        "product": PRODUCTS,
        "contradiction": CONTRADICTIONS,
        "not built": NOT_BUILT,
    }.items()
    for what, line in lines.items()
}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of the command, which must have ended as a mistake of the user ends."""
    code = run(words)

    printed = capsys.readouterr()
    assert code == ConfigError.exit_code == 2, printed.out
    assert "nothing was started" in printed.err
    assert "Traceback" not in printed.err
    return printed.err


def test_the_configuration_that_the_table_spoils_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(list(BASE)) == 0
    assert "#SBATCH hetjob" in capsys.readouterr().out


def test_the_table_has_many_mistakes() -> None:
    assert len(TABLE) >= 60


@pytest.mark.parametrize(("overrides", "facts"), TABLE.values(), ids=TABLE)
def test_a_mistake_is_refused_with_the_option_to_change(
    overrides: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused([*BASE, *overrides], capsys)

    assert [fact for fact in facts if fact not in message] == []


def test_mistakes_of_every_kind_are_listed_together(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["totl_steps=3", "train_gpus=eight", "n_samples=1", "hardware.gpu_flops=989", "max_new_tokens=4096"]

    message = refused([*BASE, *wrong, "train_pp_size=2"], capsys)

    wanted = ("total_steps", "train_gpus", "n_samples", "hardware.gpu_flops", "max_new_tokens", "train_pp_size")
    assert [name for name in wanted if f"{name}" not in message] == []
    assert message.startswith("6 problems")


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (
            ["max_model_len=65536", "train_tp_size=8", "rollout_gpus=12"],
            ["max_model_len=65536", "train_tp_size=8", "rollout_gpus=12"],
        ),
        (["train_gpus=12", "rollout_gpus=12"], ["train_gpus=12", "rollout_gpus=12"]),
        (["batch_size=500", "model=qwen2_5_72b"], ["batch_size=500", "training wants", "generating wants"]),
        (["train_gpus=6", "train_tp_size=16"], ["train_gpus=6", "train_tp_size=16 is more"]),
        (
            [f"{GRP}.allowed_train_ep=[2]"],
            [f"{GRP}.allowed_train_ep=[2]: training of mixture-of-experts models is not"],
        ),
    ],
    ids=[
        "model and nodes",
        "nodes of both sides",
        "options and memory",
        "what two rules find is said once",
        "what is pending is no more than that",
    ],
)
def test_contradictions_with_the_model_and_the_nodes_are_listed_with_the_others(
    overrides: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused([*BASE, *overrides], capsys)

    assert [fact for fact in facts if f"  - {fact}" not in message] == []
    assert message.startswith(f"{len(facts)} problem")


@pytest.mark.parametrize("word", ["hardware.gpu_memory_bytes=80", "n_samples=1", "totl_steps=3"])
def test_nothing_is_concluded_from_an_option_that_says_nothing(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused([*BASE, word, "train_tp_size=8"], capsys)

    assert word in message
    assert "attention heads" not in message
    assert "training wants" not in message


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["model_path={tmp}/nowhere"], ["model_path=", "is not a folder"]),
        (["model_path=Qwen/Qwen2.5-7B-Instruct"], ["model_path=Qwen/Qwen2.5-7B-Instruct is not a folder"]),
        (["model_path=''"], ["model_path is empty"]),
        (["model_path={tmp}/model"], ["no *.safetensors", "no tokenizer.json", "no chat template"]),
        (["tokenizer_path={tmp}/nowhere"], ["tokenizer_path=", "is not a folder"]),
        (["task.params.dataset=countdwn"], ["task.params.dataset", "did you mean countdown"]),
        (["task.params.options.min_number=3"], ["task.params.options.min_number", "min_numbers"]),
        (["task.name=my_tasks:Poems"], ["task.name"]),
        (["model=qwen3_30b_a3b", "hardware=h200_141g", "train_tp_size=4"], ["mixture-of-experts", "model_path"]),
    ],
)
def test_what_only_a_start_needs_is_refused_before_anything_is_made(
    overrides: list[str], facts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN))
    words = [text.format(tmp=tmp_path) for text in overrides]

    message = refused([*BASE, "launch.dry_run=false", f"launch.run_dir={tmp_path}/run", *words], capsys)

    assert [fact for fact in facts if fact not in message] == []
    assert not (tmp_path / "run").exists()


QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
}


def test_an_untried_vllm_is_refused_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "installed_vllm", lambda python: "0.40.0")

    message = refused([*BASE, "launch.dry_run=false", f"launch.run_dir={tmp_path}/run"], capsys)

    assert "set rollout_weight_reload_method=restart" in message
    assert "0.40.0" in message


def test_a_variable_of_the_environment_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RL_TRAIN_PHASE_TRACE", "yes")

    assert "RL_TRAIN_PHASE_TRACE=yes" in refused(list(BASE), capsys)
